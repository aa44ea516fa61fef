"""ContinuousBatchingManager: requests go in and answers come out while the engine runs in a thread of its own."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from cuformers.auto.batching.engine_like import EngineLike
from cuformers.auto.batching.inbox import Inbox
from cuformers.auto.batching.lifecycle import Lifecycle
from cuformers.auto.batching.options import Options, check_names
from cuformers.auto.batching.outbox import Channel, Outbox
from cuformers.auto.batching.output import RequestStatus
from cuformers.auto.batching.results import Results
from cuformers.auto.batching.submit import Submitter, Terms
from cuformers.auto.batching.tracked import Delivery
from cuformers.auto.batching.worker import Worker
from cuformers.generation.batching_config import ContinuousBatchingConfig
from cuformers.generation.config import GenerationConfig, check_config
from cuformers.generation.stopping import Decodes


class ContinuousBatchingManager(Lifecycle, Results):
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
        self._numbers = count()
        inbox, outbox = Inbox(self.config.max_queue_size), Outbox()
        Lifecycle.__init__(self, Worker(make_engine, inbox, outbox), inbox, outbox)
        Results.__init__(self, outbox)

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

    def _options(self, generation_config: GenerationConfig | None, given: dict[str, Any]) -> Options:
        if generation_config is None and not given:
            return self._plain
        return self.options(generation_config, given)

    def new_id(self) -> str:
        """An id that is not in use."""
        return next(name for n in self._numbers if not self._outbox.knows(name := f"req_{n}"))
