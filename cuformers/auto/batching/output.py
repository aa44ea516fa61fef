"""What comes of a request of continuous batching."""

from dataclasses import dataclass, field
from enum import IntEnum
from time import perf_counter


class RequestStatus(IntEnum):
    """How far a request is. From FINISHED on it is over."""

    PENDING = 0
    """Submitted, not yet given to the engine."""
    PREFILLING = 1
    """The engine has it; no token yet."""
    DECODING = 2
    """It has its first token."""
    FINISHED = 3
    """Done, as asked."""
    FAILED = 4
    """It could not run, or something broke; `error` says what."""
    CANCELLED = 5
    """Somebody ended it early. Transformers hands out nothing then."""


@dataclass(kw_only=True)
class GenerationOutput:
    """The answer to one request, or what there is of it so far."""

    request_id: str
    """Its name."""
    prompt_ids: list[int] = field(default_factory=list)
    """The prompt's tokens."""
    generated_tokens: list[int] = field(default_factory=list)
    """The answer's tokens so far; an end-of-sequence token is the last of them."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithm of each generated token's probability, where it was asked for; else empty."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each generated token the likeliest ones in its place, best first: as many as `logprobs` asked for."""
    prompt_logprobs: list[float | None] = field(default_factory=list)
    """As `logprobs`, of the prompt's tokens, given those before them; None for the first. Empty where it was not asked
    for, and in a prompt's further answers."""
    prompt_top_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=list)
    """As `top_logprobs`, of the prompt's tokens: as many as `prompt_logprobs` asked for; None for the first."""
    error: str | None = None
    """Why it failed or was cancelled; None where all is well."""
    status: RequestStatus = RequestStatus.PENDING
    """How far it is."""
    created_time: float = field(default_factory=perf_counter)
    """When it was submitted, in seconds of time.perf_counter()."""
    lifespan: tuple[float, float] = (-1, -1)
    """When the engine took it and when it ended, on the same clock; -1: not yet."""
    timestamps: list[float] | None = None
    """When each token arrived at the host, where record_timestamps was asked for."""
    finish_reason: str | None = None
    """"stop" (an end-of-sequence token or a stop string) or "length"; None where it did not end by itself."""

    def is_finished(self) -> bool:
        """Whether it is over, well or not."""
        return self.status >= RequestStatus.FINISHED
