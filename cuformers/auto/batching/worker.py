"""The thread that owns the engine: it alone calls it."""

from collections.abc import Callable
from concurrent.futures import Future

import torch

from cuformers.auto.batching.engine_like import EngineLike, EngineStats
from cuformers.auto.batching.harvest import Harvest, describe
from cuformers.auto.batching.inbox import Inbox, Stop, Work
from cuformers.auto.batching.outbox import Outbox
from cuformers.auto.batching.output import RequestStatus
from cuformers.auto.batching.tracked import Delivery, Tracked
from cuformers.base.log import notice
from cuformers.cuda import streams

_STOPPED = "the manager was stopped."
_ASLEEP = "the manager was stopped while it slept."


class Worker:
    """Takes requests from the inbox, runs the engine, and brings outputs to the outbox, until it is told to stop.

    It knows nothing of the manager, so that a forgotten manager can be collected.
    """

    def __init__(self, make_engine: Callable[[], EngineLike], inbox: Inbox, outbox: Outbox) -> None:
        self._make_engine, self._inbox, self._outbox = make_engine, inbox, outbox
        self._harvest = Harvest()
        self.engine: EngineLike | None = None
        """Made in the thread, and kept for its next one where `keep` says so."""
        self.keep = False
        self.warm = False
        """Whether the engine has warmed up."""
        self.fault: str | None = None
        """What broke the engine for good; None where it is well."""
        self.stats: EngineStats | None = None
        """After the last step."""

    @property
    def tokens(self) -> int:
        """Generated so far, by all requests."""
        return self._harvest.tokens

    def run(self, ready: Future[None], warm_up: bool) -> None:
        """The thread's work; `ready` is told when the engine is there, or why there is none."""
        reason = _STOPPED
        try:
            with torch.no_grad():  # a thread's own, as the stream is
                engine = self._engine()
                with streams.use(streams.current(engine.device)):
                    if warm_up:
                        self.warm_up(engine)
                    ready.set_result(None)
                    reason = self._loop(engine)
        except Exception as error:  # nobody else would see it, and requests wait
            self.fault, self.engine = describe(error), None
            reason = f"the engine broke: {self.fault}"
            if not ready.done():
                ready.set_exception(error)
            else:
                notice(f"continuous batching ends: {reason}")
        finally:
            self._end(reason)

    def _engine(self) -> EngineLike:
        self.fault = None
        if self.engine is None:
            self.engine, self.warm = self._make_engine(), False
        else:
            self.engine.refresh()
        return self.engine

    def prepare(self) -> None:
        """Makes the engine and warms it up before the thread starts, in the caller's."""
        with torch.no_grad():
            engine = self._engine()
            with streams.use(streams.current(engine.device)):
                self.warm_up(engine)

    def warm_up(self, engine: EngineLike) -> None:
        """Warms the engine up, unless it is warm.

        Raises:
            ValueError: it sleeps.
        """
        if engine.asleep:
            raise ValueError("the manager sleeps, and can't warm up: call wake() before.")
        if not self.warm:
            engine.warm_up()
            self.warm = True

    def put_to_sleep(self, engine: EngineLike, weights: bool) -> None:
        """Frees the engine's memory, and with it what it had warmed up."""
        engine.sleep(weights=weights)
        self.warm = False

    def _loop(self, engine: EngineLike) -> str:
        """Works until it is told to stop: why what is left then does not run."""
        busy = False
        while True:
            work = self._inbox.wait(busy, engine.asleep)
            if work.stop is Stop.HARD or (work.stop and engine.asleep):
                break
            try:
                busy = self._turn(engine, work, busy)
            except Exception as error:  # the step's requests are lost, the next ones need not be
                self._recover(engine, describe(error))
                busy = False
            self._hand_out()
            if work.stop and not busy:
                break
        return self._drop(engine)

    def _turn(self, engine: EngineLike, work: Work, busy: bool) -> bool:
        """Does what was asked, and a step: whether there is more to do."""
        if work.errand is not None:
            work.errand.run(engine)
        if work.resumed and not engine.asleep:
            engine.refresh()
        for tracked in work.cancel:
            if tracked in self._harvest.running:
                engine.cancel(self._harvest.running[tracked])
        for tracked in work.add:
            self._add(engine, tracked)
        if not work.run or engine.asleep:
            return bool(self._harvest.running)
        busy = engine.step()
        self.stats = engine.stats
        if not busy and self._harvest.running:
            raise RuntimeError(f"the engine stands still with {len(self._harvest.running)} requests")
        return busy

    def _add(self, engine: EngineLike, tracked: Tracked) -> None:
        request = tracked.request
        assert request is not None, "what can't run does not get here"
        self._harvest.watch(tracked, request)
        try:
            engine.add(request)
        except ValueError as error:
            self._harvest.refuse(tracked, RequestStatus.FAILED, str(error))

    def _recover(self, engine: EngineLike, fault: str) -> None:
        """Fails what was in flight, with the reason."""
        notice(f"a step of continuous batching failed: {fault}. Its requests fail, later ones run.")
        for tracked in self._harvest.running:
            tracked.error = f"a step of the engine failed: {fault}"
        engine.reset()
        for tracked in list(self._harvest.running):
            self._harvest.refuse(tracked, RequestStatus.FAILED, tracked.error or fault)

    def _drop(self, engine: EngineLike) -> str:
        """Cancels what still runs, and brings the engine to rest: why, for those whose requests it ends."""
        reason = _ASLEEP if engine.asleep else _STOPPED
        for tracked, request in list(self._harvest.running.items()):
            tracked.error = reason if engine.asleep else None
            engine.cancel(request)
        while not engine.asleep and engine.step():
            pass
        self._hand_out()
        return reason

    def _hand_out(self) -> None:
        fresh, started = self._harvest.gather()
        self._inbox.started(started)
        if fresh:
            self._outbox.deliver(fresh)

    def _end(self, reason: str) -> None:
        """Lets nobody wait for what won't come."""
        status = RequestStatus.FAILED if self.fault else RequestStatus.CANCELLED
        for tracked in list(self._harvest.running):
            self._harvest.refuse(tracked, status, reason)
        self._hand_out()
        left = self._inbox.close(reason)
        for tracked in left:
            tracked.end(status, reason)
        self._outbox.deliver([Delivery(tracked, None) for tracked in left])
        self._outbox.close()
        if not self.keep or (self.engine is not None and self.engine.asleep):
            self.engine = None
