"""A manager's life: it starts, pauses, sleeps, wakes and stops, and nothing waits for what has ended."""

import weakref
from concurrent.futures import Future
from threading import RLock, Thread, current_thread
from types import TracebackType
from typing import Self

from cuformers.auto.batching.engine_like import EngineStats
from cuformers.auto.batching.errands import Do, Errand
from cuformers.auto.batching.inbox import Inbox, Stop
from cuformers.auto.batching.outbox import Outbox
from cuformers.auto.batching.output import RequestStatus
from cuformers.auto.batching.tracked import Delivery
from cuformers.auto.batching.worker import Worker
from cuformers.base.log import notice

_FAREWELL = 5.0
"""Seconds that the end of the interpreter waits for a forgotten manager's step."""


class Lifecycle:
    """The part of a manager that runs the worker in a thread. Once nobody holds it the thread stops."""

    def __init__(self, worker: Worker, inbox: Inbox, outbox: Outbox) -> None:
        self._worker, self._inbox, self._outbox = worker, inbox, outbox
        self._thread: Thread | None = None
        self._farewell = weakref.finalize(self, _nothing)
        self._lifecycle = RLock()
        self._destroyed = False

    def start(self, *, warmup: bool = False) -> None:
        """Starts the thread, and returns when its engine is there.

        Args:
            warmup: also prepare what the first steps would otherwise wait for.

        Raises:
            ValueError: there can be no such engine, for lack of memory for instance.
            RuntimeError: the manager was destroyed.
        """
        with self._lifecycle:
            self._check_exists()
            if self.is_running():
                notice("the manager runs already.")
                return
            self._inbox.open()
            self._outbox.open()
            ready: Future[None] = Future()
            thread = Thread(
                target=self._worker.run, args=(ready, warmup), name="cuformers-continuous-batching", daemon=True
            )
            self._thread = thread
            self._farewell.detach()
            self._farewell = weakref.finalize(self, _abandon, self._inbox, thread)
            thread.start()
            ready.result()

    def is_running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def fault(self) -> str | None:
        """What broke the engine for good; None where it is well. `start` makes a new one."""
        return self._worker.fault

    @property
    def warmed_up(self) -> bool:
        """Whether the engine has warmed up."""
        return self._worker.warm

    @property
    def stats(self) -> EngineStats | None:
        """Figures of the engine after its last step; None before the first."""
        return self._worker.stats

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that all requests have generated so far."""
        return self._worker.tokens

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Ends the thread. No request can be submitted from now on.

        Args:
            block: wait for the end.
            timeout: seconds to wait; None: as long as it takes.
            keep_for_next_session: keep engine and cache for the next `start`.
            hard_stop: cancel what is not done; else it is finished before.
        """
        with self._lifecycle:
            self._worker.keep = keep_for_next_session
            if not self.is_running():
                self._close_unstarted()
                return
            self._inbox.request_stop(Stop.HARD if hard_stop else Stop.FLUSH)
        if block:
            self.join(timeout)

    def join(self, timeout: float | None = None) -> None:
        """Waits until the thread has ended, at most so many seconds."""
        if self._thread is None or self._thread is current_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            notice(f"the manager has not stopped within {timeout} s: requests still run. hard_stop=True cancels them.")

    def destroy(self) -> None:
        """Stops at once and frees the engine, for good."""
        self.stop(hard_stop=True)
        self._worker.engine = None
        self._destroyed = True

    def pause(self, timeout: float | None = None) -> bool:
        """Keeps the engine from taking steps until `resume`, so that the weights may be changed; requests wait.

        Returns:
            Whether it rests now: True unless a step took longer than `timeout` seconds.
        """
        self._inbox.pause()
        return not self.is_running() or self._inbox.rested(timeout)

    def resume(self) -> None:
        """Lets the engine go on."""
        self._inbox.resume()

    def sleep(self, *, weights: bool = False) -> None:
        """Frees cache, table and captured steps until `wake`, and returns when their memory is free.

        Nothing is lost: what runs and what is submitted meanwhile waits, running requests with their tokens so far.
        A `stop` cancels them. Sleeping twice is no error.

        Args:
            weights: move the model to the CPU too. There it stays where the manager is stopped before it wakes.

        Raises:
            ValueError: the model is spread over devices, so that its weights can't be moved.
            RuntimeError: the manager does not run.
        """
        self._errand(lambda engine: self._worker.put_to_sleep(engine, weights))

    def wake(self) -> None:
        """Brings the weights back to their device, makes the cache anew and lets the requests go on.

        Keys are computed anew, nothing that was cached before is used. Captured steps come back with use, or `warmup`.

        Raises:
            OutOfDeviceMemory: the memory is not free any more; the manager sleeps on, and nothing is lost.
            RuntimeError: the manager does not run.
        """
        self._errand(lambda engine: engine.wake())

    def update_weights(self, *, restart: bool = False) -> None:
        """Says that the model's weights were changed, best while paused: no prompt uses what was cached before.

        Changes that PyTorch counts are noticed without it: all after a pause, others after some steps. Those made
        through `.data`, or by kernels of others, are not counted.

        Args:
            restart: compute the keys of running requests anew from their tokens so far. Else they go on with the keys
                they have, of the weights before.

        Raises:
            RuntimeError: the manager does not run.
        """
        self._errand(lambda engine: engine.update_weights(restart=restart))

    def warmup(self) -> None:
        """Prepares what the first steps would otherwise wait for, before `start` or after it; once is enough.

        Raises:
            ValueError: there can be no engine, for lack of memory for instance, or it sleeps.
            RuntimeError: the manager was destroyed, or stops.
        """
        with self._lifecycle:
            self._check_exists()
            if not self.is_running():
                self._worker.prepare()
                return
        self._errand(self._worker.warm_up)

    def _errand(self, do: Do) -> None:
        """Has something done by the engine's thread between two steps, and waits for it."""
        if not self.is_running():
            raise RuntimeError("the manager does not run: start it before.")
        errand = Errand(do)
        self._inbox.send(errand)
        errand.wait()

    def _check_exists(self) -> None:
        if self._destroyed:
            raise RuntimeError("the manager was destroyed: make a new one with model.init_continuous_batching().")

    def __enter__(self) -> Self:
        if not self.is_running():
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(hard_stop=error is not None)

    def _close_unstarted(self) -> None:
        if not self._worker.keep:
            self._worker.engine = None
        reason = "the manager was stopped."
        left = self._inbox.close(reason)
        for tracked in left:
            tracked.end(RequestStatus.CANCELLED, reason)
        self._outbox.deliver([Delivery(tracked, None) for tracked in left])
        self._outbox.close()


def _nothing() -> None:
    """For a manager that has not started."""


def _abandon(inbox: Inbox, thread: Thread) -> None:
    """Stops the thread of a manager that nobody holds, or whose interpreter ends."""
    inbox.request_stop(Stop.HARD)
    if thread is not current_thread():
        thread.join(_FAREWELL)
