"""CUDA graphs: record a function's GPU work once, then start all of it with one call."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
_one_at_a_time = threading.Lock()
_failed: list[torch.cuda.CUDAGraph] = []


@dataclass(frozen=True, kw_only=True)
class CapturedGraph(Generic[T]):
    """A recorded function. Its inputs and outputs stay at the addresses they had when it was captured."""

    result: T
    """What the function returned while it was captured: tensors that every replay writes anew."""
    graph: torch.cuda.CUDAGraph
    """The recorded work."""

    def replay(self) -> None:
        """Starts the work on the current stream. The host does not wait."""
        self.graph.replay()


def new_pool() -> object:
    """A handle of a memory pool for `capture`.

    Graphs of one pool reuse each other's memory: replay them one after the other on one stream, and copy out what
    must outlive the next replay.
    """
    return torch.cuda.graph_pool_handle()


def capture(
    fn: Callable[[], T], pool: object = None, *, device: torch.device | None = None, warm_ups: int = 1
) -> CapturedGraph[T]:
    """Runs a function `warm_ups` times, then records it.

    The warm-up does what must not happen during the recording: compile kernels, create handles and workspaces. It
    really runs, so the function must bear being repeated. During the recording nothing is computed: a value read on
    the host, or a Python number taken from the data, would be frozen into the graph. Other threads may use the GPU
    meanwhile; a second capture waits for the first.

    Args:
        fn: takes its inputs from tensors that stay where they are, and returns its outputs.
        pool: from `new_pool`, to share memory with other graphs; None for memory of its own.
        device: GPU whose work is recorded; None for the current one.
        warm_ups: number of runs before the recording; 0 where the caller has already run it.

    Raises:
        RuntimeError: the function does something that can't be recorded, such as waiting for the GPU.
    """
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    with torch.cuda.device(index), _one_at_a_time:
        outside, stream = torch.cuda.current_stream(), _capture_stream(index)
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            for _ in range(warm_ups):
                fn()
            stream.synchronize()
            captured = _record(fn, new_pool() if pool is None else pool)
        outside.wait_stream(stream)
    return captured


def _record(fn: Callable[[], T], pool: object) -> CapturedGraph[T]:
    graph = torch.cuda.CUDAGraph()
    with _nothing_collected():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # pyright: ignore[reportArgumentType]
        try:
            result = fn()
            graph.capture_end()
        except BaseException:
            _abandon(graph, pool)
            raise
    return CapturedGraph(result=result, graph=graph)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python's collector stays away: giving back the memory and the graphs of dead models would break a recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _abandon(graph: torch.cuda.CUDAGraph, pool: object) -> None:
    """Ends a capture that failed, so that the process can go on.

    Where CUDA itself refused, capture_end raises (with less to say than the function's own error) and leaves torch's
    allocators asking the graph, for good, whether an allocation belongs to it. The device's is told to stop; for the
    host's, which can't be told, the graph must stay alive.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        _failed.append(graph)
        with suppress(RuntimeError):  # where it had stopped already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # pyright: ignore


@cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """One stream for every capture of a GPU: cuBLAS keeps a workspace (32 MiB on Hopper) for each stream it meets."""
    return torch.cuda.Stream(index)
