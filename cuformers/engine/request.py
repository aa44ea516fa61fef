"""One request: its prompt, how to continue it, and what came of it. Plain Python, no torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuformers.engine.group import Group


class Finish(Enum):
    """Why a request ended."""

    EOS = auto()
    LENGTH = auto()
    STOPPED = auto()
    CANCELLED = auto()
    FAILED = auto()


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


@dataclass(frozen=True, kw_only=True)
class TokenPenalties:
    """What makes tokens likelier or less likely before one is drawn, on the device: see op `penalize`."""

    repetition: float = 1.0
    """Above 0: divides positive and multiplies negative logits of tokens in prompt or answer; 1 is off."""
    frequency: float = 0.0
    """Subtracted once for each time that the token was generated."""
    presence: float = 0.0
    """Subtracted once from each token that was generated."""
    min_new_tokens: int = 0
    """Generated tokens before which none of `Request.eos` may come."""
    bias: tuple[tuple[int, float], ...] = ()
    """(token, value), each token at most once: added to its logit before all else; -inf bans it."""


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """How the next tokens are guessed: as those that followed the last place where the newest tokens stood before."""

    count: int
    """Tokens to guess, at least one."""
    longest: int = 3
    """Newest tokens to look for, at the most; where they are not found, fewer are looked for."""


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
    penalties: TokenPenalties | None = None
    """What is done to the logits first; None leaves them as they are. Not beside a group that is not `plain`."""
    group: "Group | None" = None
    """Requests of one group share their logits processors; None needs none."""
    priority: int = 0
    """Smaller runs first."""
    cache_salt: str = ""
    """Prompts share cached keys only with prompts of the same salt."""
    adapter: str = ""
    """Name of the adapter that computes the keys."""
    logprobs: int | None = None
    """Report the log-probability of each generated token, and so many of the likeliest ones; None: nothing."""
    prompt_logprobs: int | None = None
    """Report the log-probability of each prompt token, and so many of the likeliest ones; None: nothing."""
    drafts: Drafts | None = None
    """Tokens to guess and check in each step; the answer is the same, and sooner there where it repeats itself."""
    cache_prompt: bool = True
    """Whether cached keys may stand for a part of the prompt; never where `prompt_logprobs` wants all of its logits."""
    on_token: Callable[["Request", int], bool] | None = None
    """Called for each token on the host, one or two steps late; True stops the request after this token."""
    on_end: Callable[["Request"], None] | None = None
    """Called once, after the last token."""
    generated: list[int] = field(default_factory=list)
    """Tokens so far."""
    token_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each of them: natural, of the model's logits before any processing."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each of them the likeliest tokens, best first, with their log-probabilities."""
    prompt_token_logprobs: list[float | None] = field(default_factory=list)
    """Of each prompt token, given those before it; None for the first. Empty where `prompt_logprobs` is None."""
    prompt_top_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=list)
    """As `top_logprobs`, for each prompt token; None for the first."""
    finish: Finish | None = None
    """Why it ended; None while it runs."""
    error: str | None = None
    """What went wrong, where it failed."""
    breakpoint: int | None = None
    """Total length at which the request is computed anew from its tokens: where LongRoPE changes its factors. Keys of a
    text that is shorter and of one that is not are never shared."""
    row: int = -1
    """Row of the engine's table, while it has one."""
    target: int = 0
    """Tokens that were known when it got its row: they are computed in chunks, the later ones one by one."""
    computed: int = 0
    """Tokens whose keys are in the cache, or will be once every launched step is done."""
    tables: list[list[int | None]] = field(default_factory=list)
    """For each group of layers the page of each block of tokens; None where there is none any more."""

    def __post_init__(self) -> None:
        if self.prompt_logprobs is not None:
            self.cache_prompt = False
            self.prompt_token_logprobs, self.prompt_top_logprobs = [None], [None]

    @property
    def max_length(self) -> int:
        """Tokens in the end, at the most."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def total(self) -> int:
        """Tokens that the host knows."""
        return len(self.prompt) + len(self.generated)

    @property
    def context(self) -> list[int]:
        """The tokens so far, which is what a prefill computes."""
        return self.prompt + self.generated

    @property
    def limit(self) -> int:
        """Total length at which the device stops this request: its end, or where it is computed anew."""
        return self.max_length if self.breakpoint is None or self.total >= self.breakpoint else self.breakpoint

    def take(self, token: int) -> Finish | None:
        """Appends a token that the device sampled: why the request ends with it, or None."""
        assert self.finish is None, "a finished request takes no more tokens"
        self.generated.append(token)
        stopped = self.on_token is not None and self.on_token(self, token)
        if token in self.eos:
            return Finish.EOS
        if len(self.generated) >= self.max_new_tokens:
            return Finish.LENGTH
        return Finish.STOPPED if stopped else None

    def end(self, finish: Finish, error: str | None = None) -> None:
        """Marks the request as ended."""
        assert self.finish is None, "a request ends once"
        self.finish, self.error = finish, error
        if self.on_end is not None:
            self.on_end(self)
