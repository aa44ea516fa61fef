"""What users want of the engine's thread: requests, cancellations, errands, and whether it shall run at all."""

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from queue import Full
from threading import Condition, RLock
from typing import NamedTuple

from cuformers.auto.batching.errands import Errand
from cuformers.auto.batching.tracked import Tracked


class Stop(IntEnum):
    """How soon the engine's thread is to end. It only ever becomes sooner."""

    NO = 0
    FLUSH = 1
    """When everything that was submitted is done."""
    HARD = 2
    """Now."""


class Work(NamedTuple):
    """What the engine's thread is to do next."""

    add: list[Tracked]
    cancel: list[Tracked]
    stop: Stop
    run: bool
    """Whether it may take a step; False while paused or asleep."""
    resumed: bool = False
    """Whether this is the first work after a pause."""
    errand: Errand | None = None
    """To be done before all else."""


class Inbox:
    """Usable from any thread; `wait`, `started` and `close` are the engine thread's.

    The lock is reentrant because a forgotten manager is collected anywhere, also within these methods.
    """

    def __init__(self, limit: int = 0) -> None:
        """
        Args:
            limit: requests that may wait for their first token; 0 is no limit.
        """
        self._limit = limit
        lock = RLock()
        self._work, self._room, self._rest = Condition(lock), Condition(lock), Condition(lock)
        self._add: dict[Tracked, None] = {}
        self._cancel: list[Tracked] = []
        self._errands: deque[Errand] = deque()
        self._waiting = 0
        self._stop = Stop.NO
        self._paused = self._resting = self._resumed = False
        self._closed: str | None = None

    def open(self) -> None:
        """Takes requests again, after `close`."""
        with self._work:
            self._closed, self._stop, self._resting = None, Stop.NO, False

    def check_open(self) -> None:
        """Raises RuntimeError where no request can be submitted any more."""
        with self._work:
            if self._closed is not None or self._stop:
                raise RuntimeError(f"the manager takes no requests: {self._closed or 'it is stopping.'} Start it anew.")

    def submit(self, batch: Sequence[Tracked], *, block: bool = False) -> None:
        """Puts requests in the queue: all of them at once, or, with `block`, each as soon as there is room for it.

        Raises:
            queue.Full: there is no room for all; none is in the queue then.
            RuntimeError: no request can be submitted any more.
        """
        with self._work:
            self.check_open()
            if self._limit and not block and self._waiting + len(batch) > self._limit:
                raise Full(
                    f"{self._waiting} requests wait, and max_queue_size={self._limit} leaves no room for {len(batch)} "
                    "more. Try again later."
                )
            for tracked in batch:
                while self._limit and self._waiting >= self._limit:
                    self._room.wait()
                    self.check_open()
                self._add[tracked] = None
                self._waiting += 1
                self._work.notify()

    def cancel(self, tracked: Tracked) -> bool:
        """Takes a request back: True where the engine has not seen it yet; else its thread is told."""
        with self._work:
            if tracked in self._add:
                del self._add[tracked]
                self._less(1)
                return True
            self._cancel.append(tracked)
            self._work.notify()
            return False

    def send(self, errand: Errand) -> None:
        """Has an errand done between two steps, also while paused.

        Raises:
            RuntimeError: the thread ends, or has ended.
        """
        with self._work:
            self.check_open()
            self._errands.append(errand)
            self._work.notify()

    def request_stop(self, stop: Stop) -> None:
        """Asks the engine's thread to end; a paused one goes on for that."""
        with self._work:
            self._stop = max(self._stop, stop)
            self._work.notify()
            self._room.notify_all()

    def pause(self) -> None:
        """Keeps the engine's thread from taking steps."""
        with self._work:
            self._paused = self._resumed = True
            self._work.notify()

    def rested(self, timeout: float | None) -> bool:
        """Waits until a paused thread is between two steps; False where the time was too short."""
        with self._work:
            return self._rest.wait_for(lambda: self._resting or not self._paused or self._closed is not None, timeout)

    def resume(self) -> None:
        """Lets it take steps again."""
        with self._work:
            self._paused = False
            self._work.notify()

    def wait(self, busy: bool, asleep: bool = False) -> Work:
        """Waits for something to do; a busy engine always has, unless it sleeps."""
        with self._work:
            while not self._anything(busy, asleep):
                self._resting = self._holds or asleep
                self._rest.notify_all()
                self._work.wait()
            self._resting = False
            cancel, self._cancel = self._cancel, []
            if self._stop is Stop.HARD:
                return Work([], cancel, self._stop, run=False)
            errand = self._errands.popleft() if self._errands else None
            if self._holds or asleep:
                return Work([], cancel, self._stop, run=False, errand=errand)
            add, self._add = list(self._add), {}
            resumed, self._resumed = self._resumed and not self._paused, self._paused
            return Work(add, cancel, self._stop, run=True, resumed=resumed, errand=errand)

    def started(self, count: int) -> None:
        """So many requests have left the queue: with a first token, or without."""
        if count:
            with self._work:
                self._less(count)

    def close(self, reason: str) -> list[Tracked]:
        """Takes no requests any more; the ones that still wait here."""
        with self._work:
            left, self._add, self._cancel = list(self._add), {}, []
            self._waiting, self._closed = 0, reason
            while self._errands:
                self._errands.popleft().refuse(reason)
            self._room.notify_all()
            self._rest.notify_all()
            return left

    @property
    def _holds(self) -> bool:
        return self._paused and not self._stop

    def _anything(self, busy: bool, asleep: bool) -> bool:
        return bool(self._cancel or self._errands or self._stop) or (
            not (self._holds or asleep) and bool(self._add or busy)
        )

    def _less(self, count: int) -> None:
        self._waiting -= count
        self._room.notify_all()
