"""Streams, events and pinned buffers. On the CPU, where work is done when a call returns, they are inert.

Code written with these runs unchanged on both: copy on a side stream, record an event, let the other stream wait.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from cuformers.cuda.device import device_count, gpu_index


class HostEvent:
    """An event on the CPU: always past."""

    def record(self, stream: object = None) -> None:
        assert stream is None or isinstance(stream, HostStream), "an event of the CPU can't mark a GPU's stream"

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HostStream:
    """The CPU's only stream: whatever it was given is done."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        return event or HostEvent()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


Device = torch.device | str | int
Stream = torch.cuda.Stream | HostStream
Event = torch.cuda.Event | HostEvent


def side_stream(device: Device, *, urgent: bool = False) -> Stream:
    """A new stream beside the current one; `urgent` work goes before other streams' waiting work."""
    index = gpu_index(device)
    return HostStream() if index is None else torch.cuda.Stream(index, priority=-1 if urgent else 0)


def current(device: Device) -> Stream:
    """The stream that this thread's work on the device goes to now."""
    index = gpu_index(device)
    return HostStream() if index is None else torch.cuda.current_stream(index)


def use(stream: Stream) -> AbstractContextManager:
    """While entered, this thread's work on the stream's device goes to the stream."""
    return nullcontext() if isinstance(stream, HostStream) else torch.cuda.stream(stream)


def event(device: Device, *, timing: bool = False) -> Event:
    """A new event, not yet recorded; with `timing`, two of them give `milliseconds` between them."""
    return HostEvent() if gpu_index(device) is None else torch.cuda.Event(enable_timing=timing)


def record(stream: Stream, event: Event | None = None) -> Event:
    """Marks the end of the work given to the stream so far; makes the event where none is given to be used again."""
    if isinstance(stream, HostStream):
        return HostEvent()
    mark = torch.cuda.Event() if event is None else event
    mark.record(stream)
    return mark


def wait(stream: Stream, other: Stream | Event) -> None:
    """Later work of `stream` starts after what `other` stands for: an event, or a stream's work so far.

    The host does not wait. An event that was never recorded counts as past.
    """
    if isinstance(stream, HostStream) or isinstance(other, HostStream | HostEvent):
        return
    if isinstance(other, torch.cuda.Event):
        stream.wait_event(other)
    else:
        stream.wait_stream(other)


def keep_until_done(tensor: torch.Tensor, stream: Stream) -> None:
    """Keeps the memory of a tensor, freed on the host meanwhile, from reuse until the stream's work so far is done.

    Needed when a stream other than the one that allocated the tensor reads or writes it.
    """
    if not isinstance(stream, HostStream):
        tensor.record_stream(stream)


def milliseconds(begin: Event, end: Event) -> float:
    """Time between two recorded events made with `timing`, once both are past."""
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event), "only a GPU's events keep time"
    return begin.elapsed_time(end)


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor in page-locked memory, which copies to and from a GPU need to be asynchronous.

    Ordinary memory where no GPU can be used.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device_count() > 0)


def upload(values: Sequence | torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host values as a tensor on the device, copied in the current stream's order without waiting for it.

    The copy starts from page-locked memory, which torch's allocator gives to nobody else before the copy is done.
    """
    host = values.to(dtype) if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def download(values: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked host memory, complete once the current stream's work so far is."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


@contextmanager
def no_hidden_sync() -> Iterator[None]:
    """While entered, an operation that makes the host wait for a GPU raises; for tests of the steady state.

    Waiting for an event is allowed. The setting is the process's, not the thread's.
    """
    before = torch.cuda.get_sync_debug_mode() if device_count() else None
    if before is None:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
