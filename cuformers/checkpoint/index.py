"""All tensors of a checkpoint folder, by name: one model.safetensors, or shards named by an index file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cuformers.base.errors import CheckpointError
from cuformers.base.log import notice
from cuformers.checkpoint.header import Header, TensorEntry, read_header

PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MOST = 8


@dataclass(frozen=True, kw_only=True)
class Index:
    """Where every tensor of a checkpoint lies."""

    folder: Path
    """The folder that holds the files."""
    entries: Mapping[str, TensorEntry]
    """By name, in the order of files and bytes."""
    metadata: Mapping[str, str]
    """The free text of the files' headers; of the first file that has a key, where several do."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @classmethod
    def open(cls, folder: str | Path, variant: str | None = None) -> "Index":
        """Reads the headers of `model[.variant].safetensors`, or of the shards that its index file names.

        Raises CheckpointError where neither is there, a shard is missing or corrupt, or index and shards disagree.
        """
        folder = Path(folder)
        dot = f".{variant}" if variant else ""
        single, index_file = folder / f"model{dot}.safetensors", folder / f"model.safetensors.index{dot}.json"
        try:
            has_single, has_index = single.is_file(), index_file.is_file()
            if not has_single and not has_index:
                raise CheckpointError(_nothing_there(folder, variant))
        except PermissionError:
            raise CheckpointError(f"{folder} can't be read: permission denied. Give this user access to it.") from None
        if has_single and has_index:
            notice(f"{folder} holds {single.name} and {index_file.name}: {single.name} is read, the index is not.")
        return cls._of_files(folder, [single], {}) if has_single else cls._of_shards(folder, index_file)

    @classmethod
    def of_file(cls, file: str | Path) -> "Index":
        """The tensors of one safetensors file of any name."""
        file = Path(file)
        return cls._of_files(file.parent, [file], {})

    @classmethod
    def _of_shards(cls, folder: Path, index_file: Path) -> "Index":
        weight_map = _read_weight_map(index_file)
        names = sorted(set(weight_map.values()))
        gone = [name for name in names if not (folder / name).is_file()]
        if gone:
            raise CheckpointError(
                f"{index_file} names {len(names)} shards, of which {len(gone)} are missing: {_some(gone)}. "
                "Fetch or copy the whole checkpoint again."
            )
        return cls._of_files(folder, [folder / name for name in names], weight_map)

    @classmethod
    def _of_files(cls, folder: Path, files: list[Path], weight_map: Mapping[str, str]) -> "Index":
        headers = {file.name: read_header(file) for file in files}
        metadata: dict[str, str] = {}
        for header in headers.values():
            metadata = {**header.metadata, **metadata}
        return cls(folder=folder, entries=_merge(folder, headers, weight_map), metadata=metadata)


def _merge(folder: Path, headers: Mapping[str, Header], weight_map: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Entries of all files; where the index names a file for a tensor, that file's copy is the one."""
    lacking = dict(weight_map)
    merged: dict[str, TensorEntry] = {}
    for shard, header in headers.items():
        for entry in header.entries:
            if weight_map.get(entry.name, shard) != shard:
                continue
            if entry.name in merged:
                raise CheckpointError(
                    f"{folder}: tensor {entry.name!r} is in {merged[entry.name].file.name} and in {shard}, and the "
                    "index does not say which one counts."
                )
            merged[entry.name] = entry
            lacking.pop(entry.name, None)
    if lacking:
        found = [f"{name} (in {shard})" for name, shard in lacking.items()]
        raise CheckpointError(f"{folder}: the index names {len(found)} tensors that their shards lack: {_some(found)}.")
    return merged


def _read_weight_map(index_file: Path) -> dict[str, str]:
    try:
        text = index_file.read_text(encoding="utf-8")
        weight_map = json.loads(text)["weight_map"]
    except PermissionError:
        raise CheckpointError(f"{index_file} can't be read: permission denied. Give this user access to it.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index_file} is not an index with a weight_map: {error!r}.") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file}: its weight_map is not an object with names.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index_file}: tensor {name!r} is said to lie in {shard!r}; allowed is the plain name of a "
                ".safetensors file in the same folder."
            )
    return weight_map


def _nothing_there(folder: Path, variant: str | None) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder."
    others = sorted(p.name for p in folder.glob("*.safetensors*"))
    pickles = sorted(p.name for pattern in PICKLED_WEIGHTS for p in folder.glob(pattern))
    what = f" of variant {variant!r}" if variant else ""
    text = f"{folder} has no model.safetensors{what} and no index of shards{what}."
    if others:
        return f"{text} It has {_some(others)}: give the variant in their names, or complete the folder."
    held = f"It has only pickled weights ({_some(pickles)}): these" if pickles else "Pickled weights (.bin, .pt)"
    return (
        f"{text} {held} run code when read and are not loaded here. Convert them once, where you trust them: "
        "`from transformers import AutoModelForCausalLM as M; M.from_pretrained(OLD).save_pretrained(NEW)`."
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
