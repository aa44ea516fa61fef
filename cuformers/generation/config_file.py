"""generation_config.json: finding, reading and writing it, so that Transformers and cuformers read each other's."""

import ast
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from cuformers.base.errors import CheckpointError
from cuformers.base.log import notice

FILE_NAME = "generation_config.json"
WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
"""Arguments of from_pretrained that say where to look for the file."""


def locate(name: str | PathLike, file_name: str, *, subfolder: str = "", **hub: Any) -> Path:
    """The path of the file in a folder, or in the hub's cache after fetching it.

    Raises:
        FileNotFoundError: the folder or the repository has no such file, or can't be reached.
    """
    folder = Path(name)
    if folder.is_dir():
        path = folder / subfolder / file_name
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist. GenerationConfig(...).save_pretrained({str(name)!r}) makes one."
            )
        return path
    if folder.is_absolute() or str(name).startswith((".", "~")):
        raise FileNotFoundError(f"the folder {folder} does not exist.")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(str(name), file_name, subfolder=subfolder or None, **hub))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{file_name} of {str(name)!r} is neither a file in a local folder nor to be had from the hub: {error}"
        ) from error


def read(path: Path) -> dict[str, Any]:
    """The JSON object in the file.

    Raises:
        CheckpointError: it is not JSON, or not an object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}). Fetch the checkpoint again.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__} instead of a JSON object.")
    return found


def write(folder: str | PathLike, file_name: str, options: Mapping[str, Any]) -> None:
    """Writes the options; a reader sees the old file or the whole new one."""
    os.makedirs(folder, exist_ok=True)
    text = json.dumps({name: to_json(name, value) for name, value in options.items()}, indent=2, sort_keys=True) + "\n"
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{file_name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, Path(folder) / file_name)
    except BaseException:
        os.unlink(temporary)
        raise


def to_json(name: str, value: Any) -> Any:
    """The value as the file holds it. JSON has no tuple keys, so sequence_bias becomes [[[ids], bias], ...]."""
    if name == "sequence_bias" and isinstance(value, Mapping):
        return [[list(ids), float(bias)] for ids, bias in value.items()]
    return value


def from_json(name: str, value: Any) -> Any:
    """The inverse of `to_json`; also takes Transformers' string keys, as in {"(5, 6)": 1.0}."""
    if name == "sequence_bias" and isinstance(value, Mapping):
        return {ast.literal_eval(k) if isinstance(k, str) else k: bias for k, bias in value.items()}
    if name == "exponential_decay_length_penalty" and isinstance(value, list):
        return tuple(value)
    return value


def report_unknown(names: Sequence[str]) -> None:
    """Says once which keys of a file mean nothing to `generate`."""
    if names:
        notice(f"{FILE_NAME}: keys that generate does not know are kept: {', '.join(sorted(names))}", once=True)
