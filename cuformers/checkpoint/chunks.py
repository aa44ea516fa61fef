"""A load cut to pieces of one buffer's size: consecutive bytes of one file, and the tensors that they fill."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.checkpoint.plan import Copy

LARGEST_CHUNK = 16 << 20  # bytes
SMALLEST_CHUNK = 1 << 20


class Segment(NamedTuple):
    """A part of a chunk, `nbytes` bytes at `start`, that fills `target`, flat; `dtype` is the file's."""

    start: int
    nbytes: int
    dtype: torch.dtype
    target: Tensor


class Chunk(NamedTuple):
    """`nbytes` bytes of `file` from `offset` on, read at once; its segments cover it without holes."""

    file: Path
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]


def chunk_size(total: int) -> int:
    """Bytes per buffer: a 64th to a 32nd of the load within bounds, so that small models take small rings."""
    return min(max(1 << (total // 64).bit_length(), SMALLEST_CHUNK), LARGEST_CHUNK)


def chunks_of(copies: Iterable[Copy], size: int) -> list[Chunk]:
    """The copies in the files' order, cut and joined to chunks of at most `size` bytes (a multiple of 16)."""
    assert size > 0 and size % 16 == 0, f"chunk size {size} is not a multiple of 16"
    chunks: list[Chunk] = []
    segments: list[Segment] = []
    file, begin, used = Path(), 0, 0

    def close() -> None:
        if segments:
            chunks.append(Chunk(file, begin, used, tuple(segments)))
            segments.clear()

    for copy in sorted(copies, key=lambda copy: (copy.entry.file, copy.offset)):
        item, done = copy.entry.dtype.itemsize, 0
        while done < copy.nbytes:
            offset = copy.offset + done
            room = (size - used) // item * item
            # A segment is viewed in the file's dtype, so it has to begin at a multiple of the item's size.
            if not segments or copy.entry.file != file or offset != begin + used or room == 0 or used % item:
                close()
                file, begin, used, room = copy.entry.file, offset, 0, size
            taken = min(room, copy.nbytes - done)
            target = copy.target[done // item : (done + taken) // item]
            segments.append(Segment(used, taken, copy.entry.dtype, target))
            used, done = used + taken, done + taken
    close()
    return chunks
