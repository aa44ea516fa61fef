"""ContinuousBatchingManager: requests go in and answers come out while the engine runs in a thread of its own."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import count
from threading import RLock, Thread, current_thread
from types import TracebackType
from typing import Any, Self

from cuformers.auto.batching.engine_like import EngineLike, EngineStats
from cuformers.auto.batching.errands import Do, Errand
from cuformers.auto.batching.inbox import Inbox, Stop
from cuformers.auto.batching.listen import Handler, LoopChannel
from cuformers.auto.batching.options import Options, check_names
from cuformers.auto.batching.outbox import Channel, Outbox
from cuformers.auto.batching.output import GenerationOutput, RequestStatus
from cuformers.auto.batching.submit import Submitter, Terms
from cuformers.auto.batching.tracked import Delivery, Tracked
from cuformers.auto.batching.worker import Worker
from cuformers.base.log import notice
from cuformers.generation.batching_config import ContinuousBatchingConfig
from cuformers.generation.config import GenerationConfig, check_config
from cuformers.generation.stopping import Decodes

_FAREWELL = 5.0
"""Seconds that the end of the interpreter waits for a forgotten manager's step."""


class ContinuousBatchingManager:
    """Takes requests at any time, from any thread, and hands out their results.

    `model.init_continuous_batching` and `model.continuous_batching_context_manager` make it.

    A request that can't run is no exception: its result has the status FAILED and the reason in `error`. Exceptions
    are for faults of the program: an option that does not exist, an id that is in use, a manager that has stopped.

    A started manager that nobody holds any more is stopped.
    """

    def __init__(
        self,
        make_engine: Callable[[], EngineLike],
        *,
        vocab_size: int,
        max_positions: int | None,
        defaults: GenerationConfig,
        generation_config: GenerationConfig | None = None,
        config: ContinuousBatchingConfig | None = None,
    ) -> None:
        """
        Args:
            make_engine: called in the manager's thread, when it first starts.
            vocab_size: of the model.
            max_positions: the model's longest text.
            defaults: the checkpoint's options.
            generation_config: options of all requests, unless they bring their own.
            config: options of the engine.
        """
        self.config = config or ContinuousBatchingConfig()
        self._max_positions = max_positions
        self.set_options(generation_config, defaults)
        self._submitter = Submitter(vocab_size, self.config)
        self._inbox, self._outbox = Inbox(self.config.max_queue_size), Outbox()
        self._worker = Worker(make_engine, self._inbox, self._outbox)
        self._thread: Thread | None = None
        self._farewell = weakref.finalize(self, _nothing)
        self._lifecycle = RLock()
        self._numbers = count()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopChannel] = weakref.WeakKeyDictionary()
        self._destroyed = False

    def set_options(self, generation_config: GenerationConfig | None, defaults: GenerationConfig) -> None:
        """Changes the options of later requests; both configs are copied.

        Raises:
            ValueError: what is passed is no GenerationConfig.
        """
        check_config(generation_config)
        self.generation_config = None if generation_config is None else generation_config.copy()
        self._defaults = defaults.copy()
        self._plain = self.options(None, {})

    def options(self, generation_config: GenerationConfig | None, given: dict[str, Any]) -> Options:
        """The options of some requests; without a config of their own they take the manager's.

        Raises:
            ValueError: an option that does not exist, or no GenerationConfig.
        """
        check_config(generation_config)
        check_names(given)
        return Options(
            config=self.generation_config if generation_config is None else generation_config,
            defaults=self._defaults,
            given=given,
            max_positions=self._max_positions,
        )

    def check_options(self, options: Options, prompts: int) -> None:
        """Raises ValueError for options that no prompt of so many can run with."""
        self._submitter.check(options, prompts)

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

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        generation_config: GenerationConfig | None = None,
        tokenizer: Decodes | None = None,
        priority: int = 0,
        cache_salt: str = "",
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **options: Any,
    ) -> str:
        """Submits a request. One that can't run has a result too, which says why.

        Args:
            input_ids: the prompt's token ids.
            request_id: its name; None makes one up.
            max_new_tokens: tokens to generate at the most.
            streaming: hand out each token when it comes, and not only the whole at the end.
            record_timestamps: note when each token came.
            eos_token_id: token, or tokens, that end the answer.
            generation_config: options in place of the manager's.
            tokenizer: needed by stop_strings.
            priority: smaller runs first.
            cache_salt: share the cache only with prompts of the same salt.
            logprobs: report each generated token's log-probability, and so many of the likeliest tokens, 0 to 32.
            prompt_logprobs: the same for the prompt, which is then computed whole, whatever the cache has of it.
            options: any field of GenerationConfig.

        Returns:
            The request's id. With num_return_sequences=n the further answers are `<id>__child#0` and so on.

        Raises:
            ValueError: an option that does not exist, or an id that is in use, which has no other id to fail under.
            queue.Full: more requests would wait than max_queue_size.
            RuntimeError: the manager was stopped.
        """
        terms = Terms(
            streaming=streaming,
            record_timestamps=record_timestamps,
            tokenizer=tokenizer,
            priority=priority,
            cache_salt=cache_salt,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        given = {**{k: v for k, v in given.items() if v is not None}, **options}
        name = self.new_id() if request_id is None else request_id
        self.submit([(name, input_ids)], self._options(generation_config, given), terms)
        return name

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        *,
        generation_config: GenerationConfig | None = None,
        tokenizer: Decodes | None = None,
        **options: Any,
    ) -> list[str]:
        """Submits several requests, all of them or none: their ids in the same order. See `add_request`."""
        terms = Terms(streaming=streaming, record_timestamps=record_timestamps, tokenizer=tokenizer)
        given = options if max_new_tokens is None else {"max_new_tokens": max_new_tokens, **options}
        named = [(self.new_id(), input_ids) for input_ids in inputs]
        self.submit(named, self._options(generation_config, given), terms)
        return [name for name, _ in named]

    def submit(
        self,
        named: Sequence[tuple[str, Any]],
        options: Options | Sequence[Options],
        terms: Terms,
        *,
        channel: Channel | None = None,
        block: bool = False,
    ) -> list[str]:
        """Submits (request_id, input_ids) with the options of all, or with those of each.

        Args:
            channel: is given the outputs, instead of keeping them for `get_result`.
            block: wait for room in the queue.

        Returns:
            The ids of all answers.

        Raises: as `add_request`.
        """
        self._inbox.check_open()
        if isinstance(options, Options):
            made = self._submitter.make_all(named, options, terms)
        else:
            made = [self._submitter.make_all([name], own, terms)[0] for name, own in zip(named, options)]
        batch = [tracked for own in made for tracked in own]
        self._outbox.expect(batch)
        if channel is not None:
            for tracked in batch:
                self._outbox.send(tracked.request_id, channel)
        failed = [t for t in batch if t.status is RequestStatus.FAILED]
        runs = [t for t in batch if t.status is RequestStatus.PENDING]
        parts = [[tracked] for tracked in runs] if block else [runs]
        try:
            while parts:
                self._inbox.submit(parts[0], block=block)
                del parts[0]
        except Exception:
            self._outbox.forget([*failed, *(t for part in parts for t in part)])
            raise
        self._outbox.deliver([Delivery(t, None) for t in failed])
        return [t.request_id for t in batch]

    def cancel_request(self, request_id: str) -> bool:
        """Ends a request, wherever it is; its result has the status CANCELLED. False where it is over, or unknown."""
        tracked = self._outbox.find(request_id)
        if tracked is None:
            return False
        if self._inbox.cancel(tracked):
            tracked.end(RequestStatus.CANCELLED, "the request was cancelled.")
            self._outbox.deliver([Delivery(tracked, None)])
        return True

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

    def _options(self, generation_config: GenerationConfig | None, given: dict[str, Any]) -> Options:
        if generation_config is None and not given:
            return self._plain
        return self.options(generation_config, given)

    def new_id(self) -> str:
        """An id that is not in use."""
        return next(name for n in self._numbers if not self._outbox.knows(name := f"req_{n}"))

    def _check_known(self, request_id: str) -> None:
        if not self._outbox.knows(request_id):
            raise ValueError(f"request_id={request_id!r} is unknown: no such request runs, and no result waits for it.")

    def _close_unstarted(self) -> None:
        reason = "the manager was stopped."
        left: list[Tracked] = self._inbox.close(reason)
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
