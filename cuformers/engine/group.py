"""What requests of one call have in common when their logits need more than the sampler."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cuformers.engine.request import Request
from cuformers.engine.state import right_aligned_history
from cuformers.generation.processors import LogitsProcessor, RowProcessor
from cuformers.generation.rows import Rows
from cuformers.kernels.advance import DecodeState


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

    processors: Sequence[LogitsProcessor] = ()
    """Change the scores, in this order, before the sampler sees them."""
    pad: int = 0
    """Fills up shorter prompts for processors that take rectangular tokens only."""
    width: int = 0
    """Tokens of the longest prompt, which the others are filled up to."""
    keep_logits: bool = False
    """Keep the model's logits of every step."""
    keep_scores: bool = False
    """Keep the processed scores of every step."""
    traces: dict[Request, Trace] = field(default_factory=dict)
    """What was kept."""

    @property
    def plain(self) -> bool:
        """Whether the sampler alone can serve the group, inside a captured graph."""
        return not (self.processors or self.keep_logits or self.keep_scores)

    def process(self, logits: Tensor, state: DecodeState, requests: list[Request], generated: int) -> Tensor:
        """The scores for the sampler, [B, V] float32, of requests that have generated the same number of tokens.

        Args:
            logits: [B, V].
            state: the requests' rows; only history and positions are read.
            requests: B of them.
            generated: tokens that each of them has generated.
        """
        scores = logits.float()
        length = max(len(r.prompt) for r in requests) + generated
        prompts = torch.tensor([len(r.prompt) for r in requests]).to(logits.device, non_blocking=True)
        ragged = Rows(state.history[:, :length], state.positions + 1, prompts)
        for processor in self.processors:
            if isinstance(processor, RowProcessor):
                scores = processor.process(ragged, scores)
            else:
                scores = processor(right_aligned_history(state, self.width + generated, self.pad), scores)
        self._keep(requests, logits, scores)
        return scores

    def _keep(self, requests: list[Request], logits: Tensor, scores: Tensor) -> None:
        for row, request in enumerate(requests):
            trace = self.traces.setdefault(request, Trace())
            if self.keep_logits:
                trace.logits.append(logits[row].float())
            if self.keep_scores:
                trace.scores.append(scores[row])
