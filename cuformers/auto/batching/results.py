"""Who asks for outputs: threads that wait, loops that are called back, coroutines."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator

from cuformers.auto.batching.listen import Handler, LoopChannel
from cuformers.auto.batching.outbox import Outbox
from cuformers.auto.batching.output import GenerationOutput
from cuformers.auto.batching.tracked import Delivery


class Results:
    """The part of a manager that hands out what has come, from any thread and in any event loop."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopChannel] = weakref.WeakKeyDictionary()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output, of one request or of any. Without streaming, that is the whole.

        Args:
            request_id: None takes the oldest output there is.
            timeout: seconds to wait.

        Returns:
            The output; None after the time, or where none can come as the manager does not run.

        Raises:
            ValueError: no request has this id, or its result was taken.
        """
        if request_id is not None:
            self._check_known(request_id)
        delivery = self._outbox.take(request_id, timeout)
        return None if delivery is None else delivery.output()

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until the manager has stopped and all are taken."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """A request's outputs, until it is over: with streaming=True one for each token."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], object]) -> None:
        """Calls `callback(output)` in the running event loop for each output of a request, until it is over.

        The id need not be submitted yet. Outputs that are there already come first.

        Raises:
            RuntimeError: no event loop runs in this thread.
        """
        self._listen(request_id, lambda delivery: callback(delivery.output()))

    async def stream(self, request_id: str) -> AsyncIterator[GenerationOutput]:
        """A request's outputs, until it is over, in any event loop: with streaming=True one for each token.

        Raises:
            ValueError: no request has this id, or its result was taken.
        """
        self._check_known(request_id)
        arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        channel = self._listen(request_id, arrived.put_nowait)
        over = False
        try:
            while not over:
                delivery = await arrived.get()
                over = delivery.last
                yield delivery.output()
        finally:
            if not over:  # somebody else may want the rest
                channel.forget(request_id)
                self._outbox.give_back(request_id, [arrived.get_nowait() for _ in range(arrived.qsize())])

    async def result(self, request_id: str) -> GenerationOutput:
        """A request's last output, in any event loop.

        Raises:
            ValueError: no request has this id, or its result was taken.
        """
        async for output in self.stream(request_id):
            if output.is_finished():
                return output
        raise AssertionError("a stream ends with the last output")

    def _listen(self, request_id: str, handler: Handler) -> LoopChannel:
        loop = asyncio.get_running_loop()
        channel = self._loops.get(loop)
        if channel is None:
            channel = self._loops[loop] = LoopChannel(loop, self._outbox.give_back)
        channel.register(request_id, handler)
        self._outbox.send(request_id, channel)
        return channel

    def _check_known(self, request_id: str) -> None:
        if not self._outbox.knows(request_id):
            raise ValueError(f"request_id={request_id!r} is unknown: no such request runs, and no result waits for it.")
