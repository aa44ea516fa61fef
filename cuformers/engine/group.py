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
    batch: list[Request] = field(default_factory=list)
    """The call's requests in its order: processors that take rectangular tokens see all of its rows, as Transformers
    calls them, and can tell them by number. Empty: they see the rows at hand alone."""
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

    @property
    def rectangular(self) -> bool:
        """Whether a processor takes rectangular tokens only, so that `process` must be told what each row generated."""
        return not all(isinstance(p, RowProcessor) for p in self.processors)

    def process(
        self,
        logits: Tensor,
        state: DecodeState,
        requests: list[Request],
        bound: int,
        generated: Sequence[int] | None = None,
    ) -> Tensor:
        """The scores for the sampler, [B, V] float32, of rows of any lengths.

        A processor for rectangular tokens is called once for each number of generated tokens, as Transformers, whose
        rows all go in step, has no batch in which they differ.

        Args:
            logits: [B, V].
            state: the requests' rows; only history and positions are read.
            requests: B of them.
            bound: no row has more tokens, prompt and answer; how far it is above them changes nothing.
            generated: B, tokens that each row has generated; only a `rectangular` group needs them.
        """
        scores = logits.float()
        prompts = _put([len(r.prompt) for r in requests], logits.device)
        ragged = Rows(state.history[:, :bound], state.positions + 1, prompts)
        for processor in self.processors:
            if isinstance(processor, RowProcessor):
                scores = processor.process(ragged, scores)
            else:
                assert generated is not None, f"{type(processor).__name__} needs to know what each row generated"
                scores = self._in_step(processor, state, requests, generated, scores)
        self._keep(requests, logits, scores)
        return scores

    def _in_step(
        self,
        processor: LogitsProcessor,
        state: DecodeState,
        requests: list[Request],
        generated: Sequence[int],
        scores: Tensor,
    ) -> Tensor:
        """The scores after a processor for rectangular tokens; rows that generated equally many go together."""
        for count in sorted(set(generated)):
            own = [row for row, n in enumerate(generated) if n == count]
            place = _put(own, scores.device)
            ids = right_aligned_history(state, self.width + count, self.pad)[place]
            new = self._in_batch(processor, ids, scores[place], [requests[row] for row in own])
            scores = scores.index_copy(0, place, new)
        return scores

    def _in_batch(self, processor: LogitsProcessor, ids: Tensor, scores: Tensor, requests: list[Request]) -> Tensor:
        """The new scores of some rows, among the call's others: these have zeros for scores."""
        assert all(len(r.prompt) <= self.width for r in requests), "width is that of the longest prompt"
        if not self.batch or self.batch == requests:
            return processor(ids, scores)
        place = _put([self.batch.index(r) for r in requests], scores.device)
        whole = _put([self._padded(r, ids.shape[1]) for r in self.batch], scores.device)
        others = scores.new_zeros(len(self.batch), scores.shape[1])
        return processor(whole.index_copy(0, place, ids), others.index_copy(0, place, scores))[place]

    def _padded(self, request: Request, length: int) -> list[int]:
        """A row's tokens as the host knows them, filled up on both sides, or cut, to `length`."""
        tokens = [self.pad] * (self.width - len(request.prompt)) + request.context
        return (tokens + [self.pad] * length)[:length]

    def _keep(self, requests: list[Request], logits: Tensor, scores: Tensor) -> None:
        for row, request in enumerate(requests):
            trace = self.traces.setdefault(request, Trace())
            if self.keep_logits:
                trace.logits.append(logits[row].float())
            if self.keep_scores:
                trace.scores.append(scores[row])


def _put(values: Sequence, device: torch.device) -> Tensor:
    """Integers on the device, which the host does not wait for."""
    return torch.tensor(values).to(device, non_blocking=True)
