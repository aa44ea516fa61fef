"""What requests of one call have in common when their logits need more than the sampler."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from cuformers.engine.request import Request

Process = Callable[[Tensor, Tensor], Tensor]
"""(tokens so far [B, L], scores [B, V] float32) -> scores [B, V]: a Transformers logits processor."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What was kept of one request: a row for each generated token."""

    logits: list[Tensor] = field(default_factory=list)
    """[V] each, as the model gave them, float32."""
    scores: list[Tensor] = field(default_factory=list)
    """[V] each, after the processors, float32."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Logits processing, and what to keep, for the requests of one call."""

    process: Process | None = None
    """Changes the scores before the sampler sees them."""
    pad: int = 0
    """Fills up shorter rows of the token history that `process` is given."""
    keep_logits: bool = False
    """Keep the model's logits of every step."""
    keep_scores: bool = False
    """Keep the processed scores of every step."""
    traces: dict[Request, Trace] = field(default_factory=dict)
    """What was kept."""
    lockstep: bool = False
    """The host must see each token before the next step starts (custom stopping criteria)."""

    @property
    def plain(self) -> bool:
        """Whether the sampler alone can serve the group, inside a captured graph."""
        return self.process is None and not (self.keep_logits or self.keep_scores)

    def keep(self, requests: list[Request], logits: Tensor, scores: Tensor) -> None:
        """Keeps this step's rows of the requests that still run."""
        for row, request in enumerate(requests):
            trace = self.traces.setdefault(request, Trace())
            if self.keep_logits:
                trace.logits.append(logits[row].float())
            if self.keep_scores:
                trace.scores.append(scores[row])
