"""From prompts and options to requests. What can't run is a failed request, with its reason, and no exception."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from cuformers.auto.batching.groups import Groups
from cuformers.auto.batching.options import Options
from cuformers.auto.batching.output import RequestStatus
from cuformers.auto.batching.prompt import as_list, read_prompt
from cuformers.auto.batching.stops import MaxTime, StopStrings
from cuformers.auto.batching.tracked import Tracked
from cuformers.auto.requests import engine_request
from cuformers.base.errors import bad_argument
from cuformers.engine.request import Request
from cuformers.generation.batching_config import ContinuousBatchingConfig
from cuformers.generation.resolved import ResolvedGeneration
from cuformers.generation.seeds import row_seed, row_seeds
from cuformers.generation.stopping import Decodes

_SHORTEST = 1
"""Tokens of a prompt at which options that no prompt fits show themselves."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What requests have beside prompt and options."""

    streaming: bool = False
    """Hand out each token when it comes."""
    record_timestamps: bool = False
    """Note when each token came."""
    tokenizer: Decodes | None = None
    """Reads the text for stop_strings."""
    priority: int = 0
    """Smaller runs first."""
    cache_salt: str = ""
    """Prompts share the cache only with prompts of the same salt."""
    logprobs: int | None = None
    """So many of the likeliest tokens for each generated one, with their log-probabilities and its own."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt."""

    def check(self) -> None:
        """Raises ValueError for what the engine could not put in order or look up: all of its requests would fail."""
        if type(self.priority) is not int:
            raise bad_argument("priority", self.priority, "an integer")
        if not isinstance(self.cache_salt, str):
            raise bad_argument("cache_salt", self.cache_salt, "a string")


class Submitter:
    """Makes the requests of one manager. Usable from any thread."""

    def __init__(self, vocab_size: int, config: ContinuousBatchingConfig) -> None:
        self._vocab_size, self._config = vocab_size, config
        self._groups = Groups(vocab_size)
        self._rows = count()

    def check(self, options: Options, prompts: int, length: int = _SHORTEST) -> None:
        """Raises ValueError for options that no prompt of the length can run with, or seeds for other answers."""
        resolved = options.resolved(length)
        answers = prompts * resolved.num_return_sequences
        if isinstance(resolved.seed, tuple) and len(resolved.seed) != answers:
            raise bad_argument("seed", list(resolved.seed), f"one integer, or a list of {answers}, one for each answer")

    def seeds(self, options: Options, prompts: int, length: int = _SHORTEST) -> list[list[int]]:
        """For each prompt the seeds of its answers: as `generate` has them for such a batch.

        Raises:
            ValueError: as of `check`.
        """
        self.check(options, prompts, length)
        resolved = options.resolved(length)
        answers = resolved.num_return_sequences
        if not resolved.do_sample:
            drawn = [0] * (prompts * answers)
        elif resolved.seed is None and self._config.seed is not None:
            drawn = [row_seed(self._config.seed, next(self._rows)) for _ in range(prompts * answers)]
        else:
            seed = list(resolved.seed) if isinstance(resolved.seed, tuple) else resolved.seed
            drawn = row_seeds(seed, prompts * answers)
        return [drawn[i : i + answers] for i in range(0, len(drawn), answers)]

    def make_all(self, named: Sequence[tuple[str, Any]], options: Options, terms: Terms) -> list[list[Tracked]]:
        """For each (request_id, input_ids) its requests, as `make` makes them."""
        alone = len(named) == 1 and isinstance(named[0][1], list) and len(named[0][1]) > 0
        try:
            # A single prompt fails with the options anyway, so they need to be resolved for its length only.
            seeds = self.seeds(options, len(named), len(named[0][1]) if alone else _SHORTEST)
        except ValueError as error:
            return [[_failed(request_id, input_ids, error)] for request_id, input_ids in named]
        return [self.make(*name, options, terms, own) for name, own in zip(named, seeds)]

    def make(
        self, request_id: str, input_ids: Any, options: Options, terms: Terms, seeds: Sequence[int]
    ) -> list[Tracked]:
        """The requests of a prompt: its own, and of further answers `<request_id>__child#<number>`."""
        try:
            terms.check()
            prompt = read_prompt(input_ids, self._vocab_size)
            resolved = options.resolved(len(prompt))
            names = [request_id, *(f"{request_id}__child#{i}" for i in range(len(seeds) - 1))]
            further = replace(terms, prompt_logprobs=None)  # the first answer tells of the prompt they share
            own = [terms, *[further] * (len(seeds) - 1)]
            return [self._tracked(name, prompt, resolved, *its) for name, its in zip(names, zip(own, seeds))]
        except ValueError as error:
            return [_failed(request_id, input_ids, error)]

    def _tracked(
        self, request_id: str, prompt: list[int], resolved: ResolvedGeneration, terms: Terms, seed: int
    ) -> Tracked:
        chosen = 0 if self._config.return_logprobs or resolved.output_logprobs else None  # of the chosen token alone
        request = engine_request(
            prompt,
            resolved,
            seed,
            self._vocab_size,
            group=self._groups.of(resolved),
            priority=terms.priority,
            cache_salt=terms.cache_salt,
            logprobs=chosen if terms.logprobs is None else terms.logprobs,
            prompt_logprobs=terms.prompt_logprobs,
        )
        return Tracked(
            request_id=request_id,
            prompt_ids=prompt,
            request=request,
            streaming=terms.streaming,
            record_timestamps=terms.record_timestamps,
            stops=_stops(resolved, terms.tokenizer),
        )


def _stops(resolved: ResolvedGeneration, tokenizer: Decodes | None) -> list[Callable[[Request], bool]]:
    made: list[Callable[[Request], bool]] = []
    if resolved.stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer: pass tokenizer=tokenizer.")
        made.append(StopStrings(tokenizer, resolved.stop_strings))
    if resolved.max_time is not None:
        made.append(MaxTime(resolved.max_time))
    return made


def _failed(request_id: str, input_ids: Any, error: ValueError) -> Tracked:
    try:
        prompt = as_list(input_ids)
    except ValueError:
        prompt = []
    made = Tracked(request_id=request_id, prompt_ids=prompt)
    made.end(RequestStatus.FAILED, str(error))
    return made
