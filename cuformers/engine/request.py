"""One request: its prompt, how to continue it, and what came of it. Plain Python, no torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto


class Finish(Enum):
    """Why a request ended."""

    EOS = auto()
    LENGTH = auto()
    STOPPED = auto()


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn, on the device."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the largest one."""
    top_k: int = 0
    """Keep so many of the largest logits; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability."""
    min_p: float = 0.0
    """Drop tokens below this share of the largest probability."""
    seed: int = 0
    """Key of the request's random numbers; (seed, position) decides a draw, whatever the batch."""


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt on its way through the engine."""

    prompt: list[int]
    """Token ids, at least one."""
    max_new_tokens: int
    """Generated tokens at the most, at least one."""
    eos: tuple[int, ...] = ()
    """Tokens that end the request; the one that does is part of the output."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are drawn."""
    group: int = 0
    """Requests of one group share their logits processors."""
    on_token: Callable[["Request", int], bool] | None = None
    """Called for each token on the host, one or two steps late; True stops the request after this token."""
    generated: list[int] = field(default_factory=list)
    """Tokens so far."""
    finish: Finish | None = None
    """Why it ended; None while it runs."""
    breakpoint: int | None = None
    """Total length at which the request is computed anew from its tokens: where LongRoPE changes its factors."""
    slot: int = -1
    """Row of the decode state, while it has one."""
    pages: list[int] = field(default_factory=list)
    """Pages of the cache, while it holds any."""

    @property
    def max_length(self) -> int:
        """Tokens in the end, at the most."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def context(self) -> list[int]:
        """The tokens so far, which is what a prefill computes."""
        return self.prompt + self.generated

    @property
    def limit(self) -> int:
        """Total length at which the device stops this request: its end, or where it is computed anew."""
        length = len(self.prompt) + len(self.generated)
        return self.max_length if self.breakpoint is None or length >= self.breakpoint else self.breakpoint

    def take(self, token: int) -> None:
        """Appends a token that the device sampled, and ends the request where it must."""
        assert self.finish is None, "a finished request takes no more tokens"
        self.generated.append(token)
        stopped = self.on_token is not None and self.on_token(self, token)
        if token in self.eos:
            self.finish = Finish.EOS
        elif len(self.generated) >= self.max_new_tokens:
            self.finish = Finish.LENGTH
        elif stopped:
            self.finish = Finish.STOPPED
