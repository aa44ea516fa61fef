"""From files to tensors at the speed of the machine: threads read ahead into a ring of buffers, copies follow in order.

The limits are the copy page cache -> pinned memory (about 10 GB/s a thread, hence several) and the link to the GPU.
A CPU's tensor of the file's own dtype is read into in place, without a buffer between.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from cuformers.base.errors import CheckpointError
from cuformers.checkpoint.chunks import LARGEST_CHUNK, Chunk, chunk_size, chunks_of
from cuformers.checkpoint.header import TensorEntry
from cuformers.checkpoint.plan import Copy
from cuformers.cuda import streams

NUM_SLOTS = 16  # buffers of the largest chunk: the most host memory that a load takes
NUM_READERS = 8
_MOST_VECTORS = 1024  # IOV_MAX


def stream_copies(
    copies: Sequence[Copy],
    *,
    chunk_bytes: int | None = None,
    num_slots: int = NUM_SLOTS,
    num_readers: int | None = None,
    advance: Callable[[int], None] = lambda amount: None,
) -> None:
    """Does the copies, device by device; returns when all bytes are where they belong.

    Raises CheckpointError where a file ends early or can't be read; some targets are filled by then.
    """
    size = chunk_bytes or chunk_size(sum(copy.nbytes for copy in copies))
    readers = num_readers or min(NUM_READERS, _num_cores())
    by_device: dict[torch.device, list[Copy]] = {}
    for copy in copies:
        by_device.setdefault(copy.target.device, []).append(copy)
    with ExitStack() as stack:
        files = _open_all({copy.entry.file for copy in copies}, stack)
        pool = stack.enter_context(ThreadPoolExecutor(readers, thread_name_prefix="cuformers-load"))
        for device, here in by_device.items():
            chunks = chunks_of(here, size)
            if device.type == "cpu":
                fill_in_place(chunks, files, pool, advance)
            else:
                fill_through_ring(chunks, files, pool, advance, device=device, size=size, num_slots=num_slots)


def fill_in_place(
    chunks: Sequence[Chunk], files: Mapping[Path, int], pool: ThreadPoolExecutor, advance: Callable[[int], None]
) -> None:
    """To the CPU: bytes are read where they belong; what needs converting goes through one buffer per thread."""
    own = threading.local()

    def fill(chunk: Chunk) -> int:
        if all(s.dtype == s.target.dtype for s in chunk.segments):
            _read(files[chunk.file], chunk, [_bytes_of(s.target) for s in chunk.segments])
            return chunk.nbytes
        if getattr(own, "buffer", None) is None or own.buffer.numel() < chunk.nbytes:
            own.buffer = torch.empty(chunk.nbytes, dtype=torch.uint8)
        _read(files[chunk.file], chunk, [_bytes_of(own.buffer[: chunk.nbytes])])
        for s in chunk.segments:
            s.target.copy_(own.buffer[s.start : s.start + s.nbytes].view(s.dtype))
        return chunk.nbytes

    reads = [pool.submit(fill, chunk) for chunk in chunks]
    try:
        for read in reads:
            advance(read.result())
    finally:
        _cancel(reads)


class _Slot:
    """One pinned buffer of the ring, free again when `done` is past. Got by the threads: that takes long."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self.done, self._buffer = size, streams.event(device), None

    def fill(self, chunk: Chunk, fd: int) -> Tensor:
        if self._buffer is None:
            self._buffer = streams.pinned_empty((self._size,), torch.uint8)
        self.done.synchronize()
        filled = self._buffer[: chunk.nbytes]
        _read(fd, chunk, [_bytes_of(filled)])
        return filled


def fill_through_ring(
    chunks: Sequence[Chunk],
    files: Mapping[Path, int],
    pool: ThreadPoolExecutor,
    advance: Callable[[int], None],
    *,
    device: torch.device,
    size: int,
    num_slots: int,
) -> None:
    """To a GPU: threads fill pinned buffers in turn, which a side stream copies in order, converting there."""
    side = streams.side_stream(device)
    slots = [_Slot(size, device) for _ in range(min(num_slots, len(chunks)))]
    pending: deque[tuple[Chunk, _Slot, Future[Tensor]]] = deque()
    converts = any(s.dtype != s.target.dtype for chunk in chunks for s in chunk.segments)
    # Of the current stream's memory: each side stream would keep a cache of its own.
    staging = torch.empty(size, dtype=torch.uint8, device=device) if converts else None
    streams.wait(side, streams.current(device))  # the memory of staging and targets may still be in use
    try:
        with streams.use(side):
            for i in range(len(chunks) + len(slots)):
                if i >= len(slots):
                    chunk, slot, read = pending.popleft()
                    _upload(chunk, read.result(), staging)
                    streams.record(side, slot.done)
                    advance(chunk.nbytes)
                if i < len(chunks):
                    slot = slots[i % len(slots)]
                    pending.append((chunks[i], slot, pool.submit(slot.fill, chunks[i], files[chunks[i].file])))
    finally:
        _cancel([read for _, _, read in pending])
        side.synchronize()


def _upload(chunk: Chunk, filled: Tensor, staging: Tensor | None) -> None:
    plain = all(s.dtype == s.target.dtype for s in chunk.segments)
    if not plain:
        assert staging is not None
        staging[: chunk.nbytes].copy_(filled, non_blocking=True)
    for s in chunk.segments:
        part = slice(s.start, s.start + s.nbytes)
        if plain or staging is None:
            s.target.view(torch.uint8).copy_(filled[part], non_blocking=True)
        else:
            s.target.copy_(staging[part].view(s.dtype))


def read_tensor(entry: TensorEntry) -> Tensor:
    """One tensor of a checkpoint on the CPU, in its own dtype and shape."""
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    if entry.nbytes:
        stream_copies([Copy(entry, entry.offset, entry.nbytes, tensor.view(-1))], num_readers=1)
    return tensor


def same_bytes(one: Copy, other: Copy) -> bool:
    """Whether two parts of files hold the same bytes of the same dtype; reads both, a chunk at a time."""
    if (one.nbytes, one.entry.dtype) != (other.nbytes, other.entry.dtype):
        return False
    buffers = [torch.empty(min(LARGEST_CHUNK, one.nbytes), dtype=torch.uint8) for _ in range(2)]
    with ExitStack() as stack:
        files = _open_all({one.entry.file, other.entry.file}, stack)
        for done in range(0, one.nbytes, LARGEST_CHUNK):
            count = min(LARGEST_CHUNK, one.nbytes - done)
            for copy, buffer in zip((one, other), buffers):
                part = Chunk(copy.entry.file, copy.offset + done, count, ())
                _read(files[part.file], part, [_bytes_of(buffer[:count])])
            if not torch.equal(buffers[0][:count], buffers[1][:count]):
                return False
    return True


def _open_all(paths: Iterable[Path], stack: ExitStack) -> dict[Path, int]:
    files = {}
    for path in sorted(paths):
        try:
            files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} can't be opened: {error.strerror}.") from error
        stack.callback(os.close, files[path])
        if sys.platform == "linux":
            os.posix_fadvise(files[path], 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return files


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a flat CPU tensor, to be read into."""
    return tensor.view(torch.uint8).numpy().data


def _read(fd: int, chunk: Chunk, into: list[memoryview]) -> None:
    """Fills the buffers one after the other from the chunk's place in the file; other threads run meanwhile."""
    offset, views = chunk.offset, deque(into)
    while views:
        try:
            got = os.preadv(fd, list(islice(views, _MOST_VECTORS)), offset)
        except OSError as error:
            raise CheckpointError(f"{chunk.file} can't be read at byte {offset}: {error.strerror}.") from error
        if got == 0:
            raise CheckpointError(f"{chunk.file} ended at byte {offset} while being read: something has cut it short.")
        offset += got
        while views and got >= len(views[0]):
            got -= len(views.popleft())
        if got:
            views[0] = views[0][got:]


def _cancel(reads: Iterable[Future]) -> None:
    for read in reads:
        read.cancel()
