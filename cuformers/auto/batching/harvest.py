"""What the engine's steps bring in, gathered until the step is over."""

from functools import partial
from time import perf_counter

from cuformers.auto.batching.output import RequestStatus
from cuformers.auto.batching.tracked import Delivery, Tracked
from cuformers.engine.request import Request


class Harvest:
    """Tokens and ends of the requests that the engine has. The engine's thread's own."""

    def __init__(self) -> None:
        self.running: dict[Tracked, Request] = {}
        """What the engine has."""
        self.tokens = 0
        """Generated so far, by all requests."""
        self._fresh: list[Delivery] = []
        self._started = 0

    def watch(self, tracked: Tracked, request: Request) -> None:
        """Follows a request that the engine is about to take."""
        request.on_token, request.on_end = partial(self._token, tracked), partial(self._end, tracked)
        tracked.status, tracked.taken_time = RequestStatus.PREFILLING, perf_counter()
        self.running[tracked] = request

    def refuse(self, tracked: Tracked, status: RequestStatus, error: str) -> None:
        """Ends a request that the engine did not take, or lost."""
        self._leave(tracked, self.running[tracked])
        tracked.end(status, error)
        self._fresh.append(Delivery(tracked, None))

    def gather(self) -> tuple[list[Delivery], int]:
        """The outputs since the last call, and how many requests have left the queue."""
        fresh, started = self._fresh, self._started
        self._fresh, self._started = [], 0
        return fresh, started

    def _token(self, tracked: Tracked, request: Request, token: int) -> bool:
        self.tokens += 1
        if tracked.status is RequestStatus.PREFILLING:
            tracked.status = RequestStatus.DECODING
            self._started += 1
        if tracked.record_timestamps:
            tracked.timestamps.append(perf_counter())
        if tracked.streaming:
            self._fresh.append(Delivery(tracked, len(request.generated)))
        return bool(tracked.stops) and self._stops(tracked, request)

    def _stops(self, tracked: Tracked, request: Request) -> bool:
        try:
            return any(stop(request) for stop in tracked.stops)
        except Exception as error:  # a tokenizer's fault ends this request, not the step of all
            tracked.error = f"looking for stop strings failed: {describe(error)}"
            return True

    def _end(self, tracked: Tracked, request: Request) -> None:
        self._leave(tracked, request)
        if self._fresh and self._fresh[-1].tracked is tracked:
            self._fresh.pop()  # the last token, which the end shows too
        tracked.follow_engine(request)
        self._fresh.append(Delivery(tracked, None))


    def _leave(self, tracked: Tracked, request: Request) -> None:
        request.on_token = request.on_end = None  # they refer back to it
        del self.running[tracked]
        if tracked.status is RequestStatus.PREFILLING:
            self._started += 1


def describe(error: BaseException) -> str:
    """An error for people who don't see its traceback."""
    return f"{type(error).__name__}: {error}"
