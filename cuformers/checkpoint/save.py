"""Tensors into safetensors files: one, or shards and an index, as Transformers writes them; whole or not at all."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.base.log import progress as progress_bar
from cuformers.checkpoint.atomic import json_bytes, scratch_folder, sync_folder, write_synced
from cuformers.checkpoint.header import DTYPE_NAMES
from cuformers.checkpoint.sizes import parse_size
from cuformers.checkpoint.weight_map import IDENTITY, WeightMap, part_of
from cuformers.cuda import streams

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_BUFFER_BYTES = 16 << 20
_SPARE_BYTES = 1 << 20  # headers, index, folder entries


class FileTensor(NamedTuple):
    """One tensor of a file: its parts, one after the other along dim 0, wherever they lie."""

    name: str
    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        if len(self.parts) == 1:
            return tuple(first.shape)
        return (sum(part.shape[0] for part in self.parts), *first.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save_weights(
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    *,
    weight_map: WeightMap = IDENTITY,
    max_shard_size: int | str = "50GB",
    metadata: Mapping[str, str] | None = None,
    progress: bool = True,
) -> list[Path]:
    """Writes the module's tensors under the file's names; returns the files, the index last where there is one.

    A tensor under several names (a tie) is written once, under the first. Host memory taken: one buffer of 16 MiB.
    Everything is written and synced in a temporary folder, then renamed into place, the index last; weights of an
    earlier save in the same folder are gone afterwards. Raises ValueError for tensors that can't be written, OSError
    with the path where the disk is full or can't be written to; the earlier save is then as it was.
    """
    folder = Path(folder)
    limit = parse_size("max_shard_size", max_shard_size)
    shards = _shards(file_tensors(_without_ties(tensors), weight_map), limit)
    names = _shard_names(len(shards))
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    texts = {"format": "pt", **(metadata or {})}
    with (
        scratch_folder(folder, total + _SPARE_BYTES) as scratch,
        progress_bar("Saving weights", total, in_bytes=True, show=None if progress else False) as bar,
    ):
        for name, shard in zip(names, shards):
            write_safetensors(scratch / name, shard, texts, bar.advance)
        if len(shards) > 1:
            weight_map_of_files = {tensor.name: name for name, shard in zip(names, shards) for tensor in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map_of_files}
            write_synced(scratch / INDEX_NAME, json_bytes(index, sort_keys=True))
            names.append(INDEX_NAME)
        _move_into_place(scratch, folder, names)
    return [folder / name for name in names]


def file_tensors(tensors: Mapping[str, Tensor], weight_map: WeightMap) -> list[FileTensor]:
    """The module's tensors as the file has them: renamed, fused or taken apart. Copies nothing."""
    found: dict[str, FileTensor] = {}
    for name, tensor in tensors.items():
        files = weight_map.to_file(name, num_stacked=tensor.shape[0] if tensor.dim() else 0)
        for file in files:
            homes = weight_map.to_module(file)
            if name not in homes or (file in found and len(homes) == 1):
                raise ValueError(f"{name!r} would be saved as {file!r}, which a load would take for {homes}.")
            slice_ = weight_map.slice_of(file)
            if slice_ is not None:
                found[file] = FileTensor(file, (part_of(tensor, slice_),))
                continue
            absent = [home for home in homes if home not in tensors]
            if absent:
                raise ValueError(f"{file!r} can't be saved: it is made of {homes}, of which {absent} are not given.")
            found[file] = FileTensor(file, tuple(tensors[home].detach() for home in homes))
    return list(found.values())


def write_safetensors(
    path: Path,
    tensors: list[FileTensor],
    metadata: Mapping[str, str],
    advance: Callable[[int], None] = lambda amount: None,
) -> None:
    """Writes one new file and waits until the disk has it. Wide dtypes come first, so that every tensor is aligned."""
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in tensors:
        offsets = [end, end + tensor.nbytes]
        header[tensor.name] = {"dtype": _dtype_name(tensor), "shape": tensor.shape, "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in tensors:
            for part in tensor.parts:
                for piece in _on_host(part):
                    _write_all(file.fileno(), piece)
                    advance(len(piece))
        os.fsync(file.fileno())


def _on_host(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, a piece at a time; a piece is valid until the next one is asked for."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        yield flat.numpy().data
        return
    buffer = streams.pinned_empty((min(_BUFFER_BYTES, flat.numel()),), torch.uint8)
    for piece in flat.split(_BUFFER_BYTES):
        here = buffer[: piece.numel()]
        here.copy_(piece)
        yield here.numpy().data


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _dtype_name(tensor: FileTensor) -> str:
    dtypes = {part.dtype for part in tensor.parts}
    if len(dtypes) > 1 or tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"{tensor.name!r} can't be saved: safetensors has no dtype for {sorted(map(str, dtypes))}.")
    return DTYPE_NAMES[tensor.dtype]


def _without_ties(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under its first name only; parts of one storage that merely lie side by side are kept apart."""
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device: it has no values to save.")
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        first.setdefault(place if tensor.numel() else name, name)
    return {name: tensors[name] for name in first.values()}


def _shards(tensors: list[FileTensor], limit: int) -> list[list[FileTensor]]:
    """In order, each as full as `limit` bytes allow; a tensor larger than that has a shard to itself."""
    shards: list[list[FileTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _move_into_place(scratch: Path, folder: Path, names: list[str]) -> None:
    """Renames into `folder`. A crash in between leaves a folder that fails to load, never a mix of two saves."""
    stale = [folder / SINGLE_NAME, folder / INDEX_NAME, *folder.glob("model-*-of-*.safetensors")]
    stale = [p for p in stale if p.name in (SINGLE_NAME, INDEX_NAME) or _SHARD_NAME.fullmatch(p.name)]
    if len(names) > 1:  # new shards may have the old shards' names: without index nobody takes them for the old
        for path in stale[:2]:
            path.unlink(missing_ok=True)
        sync_folder(folder)
    for name in names:
        os.replace(scratch / name, folder / name)
    sync_folder(folder)
    for path in stale:
        if path.name not in names:
            path.unlink(missing_ok=True)
