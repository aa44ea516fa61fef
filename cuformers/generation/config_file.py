"""generation_config.json: finding, reading and writing it, so that Transformers and cuformers read each other's."""

import ast
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from cuformers.base.errors import CheckpointError
from cuformers.base.log import notice
from cuformers.checkpoint.resolve import require_file

FILE_NAME = "generation_config.json"
WHERE = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
"""Arguments of from_pretrained that say where to look for the file."""


def locate(name: str | PathLike, file_name: str, **where: Any) -> Path:
    """The path of the file in a folder, or in the hub's cache after fetching it.

    Raises:
        FileNotFoundError: there is none, or it can't be reached; an OSError, as callers of Transformers expect.
    """
    try:
        return require_file(name if isinstance(name, str) else Path(name), file_name, **where)
    except CheckpointError as error:
        raise FileNotFoundError(f"{error} GenerationConfig(...).save_pretrained(folder) makes one.") from error


def write(folder: str | PathLike, file_name: str, options: Mapping[str, Any]) -> None:
    """Writes the options; a reader sees the old file or the whole new one."""
    from cuformers.checkpoint.atomic import write_json_atomic  # loads torch

    values = {name: to_json(name, value) for name, value in options.items()}
    write_json_atomic(Path(folder) / file_name, values, sort_keys=True)


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
