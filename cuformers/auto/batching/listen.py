"""Channels: outputs for coroutines, and for a thread that collects them."""

import asyncio
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from cuformers.auto.batching.tracked import Delivery

Handler = Callable[[Delivery], object]


class LoopChannel:
    """Hands outputs to callbacks in an event loop, which is woken once a step of the engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, give_back: Callable[[str, list[Delivery]], None]) -> None:
        """
        Args:
            loop: where the callbacks run; it is not kept alive.
            give_back: takes outputs of a request whose callback is gone.
        """
        self._loop, self._give_back = weakref.ref(loop), give_back
        self._handlers: dict[str, Handler] = {}

    def register(self, request_id: str, handler: Handler) -> None:
        """Names the callback of a request's outputs; it is forgotten after the last one."""
        self._handlers[request_id] = handler

    def forget(self, request_id: str) -> None:
        """Takes the callback back."""
        self._handlers.pop(request_id, None)

    def put(self, deliveries: list[Delivery]) -> bool:
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._call, loop, deliveries)
        except RuntimeError:  # it is closed
            return False
        return loop is not None

    def _call(self, loop: asyncio.AbstractEventLoop, deliveries: list[Delivery]) -> None:
        for item in deliveries:
            handler = self._handlers.get(item.request_id)
            if handler is None:
                self._give_back(item.request_id, [item])
                continue
            if item.last:
                self.forget(item.request_id)
            try:
                handler(item)
            except Exception as error:  # one callback's fault is not the others'
                loop.call_exception_handler({"message": "a result handler failed", "exception": error})


class QueueChannel:
    """Collects the outputs of some requests for one thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[Delivery]] = SimpleQueue()

    def put(self, deliveries: list[Delivery]) -> bool:
        self._queue.put(deliveries)
        return True

    def get(self, timeout: float | None = None) -> Iterator[Delivery]:
        """The outputs of the next step that brings any; none after the time."""
        try:
            yield from self._queue.get(timeout=timeout)
        except Empty:
            return
