"""The header of a safetensors file, read and checked by ourselves: where each tensor's bytes lie.

Format (github.com/huggingface/safetensors): 8 bytes little-endian header length N, N bytes of JSON, then the data
without holes. The JSON maps a name to {"dtype", "shape", "data_offsets": [begin, end) within the data}, and
"__metadata__" to a map of strings.
"""

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

from cuformers.base.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint: `nbytes` bytes at `offset` (both in bytes, from the start of `file`)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class Header(NamedTuple):
    """All tensors of one file, in the order of their bytes, and the file's free text metadata."""

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """The checked header of a safetensors file. Raises CheckpointError naming the file and what is wrong with it."""
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            length = _header_length(file, start, size)
            raw = stream.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist.") from None
    except PermissionError:
        raise CheckpointError(f"{file} can't be read: permission denied. Give this user read access to it.") from None
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}.") from error
    return _checked(file, _parsed(file, raw), data_start=8 + length, file_size=size)


def _corrupt(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{file} is not a whole safetensors file: {what}. Fetch or copy it again.")


def _header_length(file: Path, start: bytes, size: int) -> int:
    if start == b"version ":
        raise _corrupt(file, "it is a Git LFS pointer, not the weights (run `git lfs pull` in its folder)")
    if len(start) < 8:
        raise _corrupt(file, f"it has {size} bytes, too few for the header's length")
    length = int.from_bytes(start, "little")
    if length > LONGEST_HEADER:
        raise _corrupt(file, f"its header claims {length} bytes, more than the format's {LONGEST_HEADER}")
    if 8 + length > size:
        raise _corrupt(file, f"truncated: the header needs {8 + length} bytes, the file has {size}")
    return length


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise KeyError(next(name for name in names if names.count(name) > 1))
    return found


def _parsed(file: Path, raw: bytes) -> dict[str, object]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except KeyError as error:
        raise _corrupt(file, f"its header has the name {error.args[0]!r} twice") from None
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise _corrupt(file, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _corrupt(file, f"its header is a JSON {type(header).__name__}, not an object")
    return header


def _checked(file: Path, header: dict[str, object], data_start: int, file_size: int) -> Header:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(file, "its __metadata__ is not a map of strings")
    entries = [_entry(file, name, value, data_start) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    end, before = data_start, "the header"
    for entry in entries:
        if entry.offset != end:
            what = "overlaps" if entry.offset < end else "leaves a hole after"
            raise _corrupt(file, f"tensor {entry.name!r} {what} {before}")
        end, before = entry.offset + entry.nbytes, repr(entry.name)
    if end > file_size:
        raise _corrupt(file, f"truncated: its tensors need {end} bytes, the file has {file_size}")
    if end < file_size:
        raise _corrupt(file, f"{file_size - end} bytes follow its last tensor")
    return Header(tuple(entries), dict(metadata))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _entry(file: Path, name: str, value: object, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _corrupt(file, f"tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(f"{file}: tensor {name!r} has dtype {dtype_name!r}; known are {', '.join(DTYPES)}.")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise _corrupt(file, f"tensor {name!r} has the shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise _corrupt(file, f"tensor {name!r} has the data_offsets {offsets!r}")
    begin, end = offsets
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise _corrupt(
            file, f"tensor {name!r} of {dtype_name} {shape} needs {needed} bytes, its offsets give {end - begin}"
        )
    return TensorEntry(name, dtype, tuple(shape), file, data_start + begin, needed)
