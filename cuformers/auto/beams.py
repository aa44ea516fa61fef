"""`generate` with num_beams: every step asks the engine for the next token's log-probabilities after each beam.

A beam is a request of its own that ends with its next token. The engine's cache holds what beams have in common and
what they had before, so that a step computes no more of a beam than its last page.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from cuformers.auto.prompts import Prompts
from cuformers.engine.engine import Engine
from cuformers.engine.group import Group
from cuformers.engine.logprobs import TOP_LOGPROBS
from cuformers.engine.request import Request
from cuformers.generation.beams import Beam, BeamOptions, Beams
from cuformers.generation.logits_warpers import LogitNormalization
from cuformers.generation.output import GenerateBeamDecoderOnlyOutput
from cuformers.generation.processors import LogitsProcessor
from cuformers.generation.resolved import ResolvedGeneration
from cuformers.generation.stopping import StoppingCriteria

Likeliest = list[tuple[int, float]]
"""Tokens and their log-probabilities, best first."""


class BeamSearch:
    """The search for one call's answers."""

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        resolved: ResolvedGeneration,
        processors: Sequence[LogitsProcessor],
        criteria: Sequence[StoppingCriteria],
    ) -> None:
        """`processors` change log-probabilities here, as in Transformers."""
        self.engine, self.prompts, self.resolved, self.criteria = engine, prompts, resolved, criteria
        self.options = BeamOptions(
            num_beams=resolved.num_beams,
            num_eos=len(resolved.eos_token_ids),
            max_new_tokens=resolved.max_new_tokens,
            length_penalty=resolved.length_penalty,
            early_stopping=resolved.early_stopping,
        )
        self.beams = [Beams(self.options) for _ in prompts.rows]
        self.pad = resolved.pad_token_id or 0
        self.processors = [LogitNormalization(), *processors]
        self.keeps_logits = resolved.output_logits or resolved.output_logprobs
        self.vocab_size = engine.model.lm_head.weight.shape[0]
        fits = self.options.num_candidates <= TOP_LOGPROBS[-1] <= self.vocab_size
        self.plain = fits and not (processors or self.keeps_logits or resolved.output_scores)
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self._requests: list[list[Request]] = [[] for _ in prompts.rows]

    def run(self) -> Tensor | GenerateBeamDecoderOnlyOutput:
        """Searches to the end: what `generate` returns."""
        self.engine.reserve([
            Request(prompt=row, max_new_tokens=self.options.max_new_tokens)
            for row in self.prompts.rows for _ in range(self.options.num_beams)
        ])  # fmt: skip
        self._step(keep_cache=False)
        while not all(beams.done for beams in self.beams):
            self._step(keep_cache=True)
        return self._output()

    def _step(self, keep_cache: bool) -> None:
        """One token more for every beam of the prompts that are still searched."""
        group = None if self.plain else self._group()
        searched = [index for index, beams in enumerate(self.beams) if not beams.done]
        for index in searched:
            self._requests[index] = [self._request(index, beam, group) for beam in self.beams[index].running]
        requests = [request for index in searched for request in self._requests[index]]
        if group is not None:
            group.batch.extend(chain.from_iterable(self._requests))
        self.engine.run(requests, keep_cache=keep_cache)
        if group is None:
            likeliest = [request.top_logprobs[0] for request in requests]
        else:
            self._keep(group, searched)
            likeliest = self._likeliest(group, requests)
        found = iter(likeliest)
        for index in searched:
            beams = self.beams[index]
            candidates = beams.candidates([next(found) for _ in beams.running])
            beams.advance(candidates, self._ended(index, candidates))

    def _group(self) -> Group:
        return Group(
            processors=self.processors,
            pad=self.pad,
            width=self.prompts.width,
            keep_logits=self.keeps_logits,
            keep_scores=True,
        )

    def _request(self, index: int, beam: Beam, group: Group | None) -> Request:
        """Asks for the token after a beam; which one the engine itself would take does not matter."""
        return Request(
            prompt=self.prompts.rows[index],
            generated=list(beam.tokens),
            max_new_tokens=len(beam.tokens) + 1,
            logprobs=self.options.num_candidates if group is None else None,
            group=group,
        )

    def _likeliest(self, group: Group, requests: Sequence[Request]) -> list[Likeliest]:
        """The likeliest tokens after the processors."""
        scores = torch.stack([group.traces[request].scores[-1] for request in requests])
        best = scores.topk(min(self.options.num_candidates, self.vocab_size))
        return [list(zip(*row)) for row in zip(best.indices.tolist(), best.values.tolist())]

    def _keep(self, group: Group, searched: Sequence[int]) -> None:
        """Keeps what the call is to return of a step, [M, V] each."""
        rows = {
            index * self.options.num_beams + place: group.traces[request]
            for index in searched for place, request in enumerate(self._requests[index])
        }  # fmt: skip
        if self.resolved.output_scores:
            self.scores.append(self._table({row: trace.scores[-1] for row, trace in rows.items()}))
        if self.keeps_logits:
            self.logits.append(self._table({row: trace.logits[-1] for row, trace in rows.items()}))

    def _table(self, rows: dict[int, Tensor]) -> Tensor:
        """[M, V], zeros where there is no row."""
        empty = torch.zeros_like(next(iter(rows.values())))
        return torch.stack([rows.get(i, empty) for i in range(len(self.beams) * self.options.num_beams)])

    def _ended(self, index: int, candidates: Sequence[Beam]) -> list[bool]:
        """Which candidates are answers."""
        eos, longest = self.resolved.eos_token_ids, self.options.max_new_tokens
        ended = [beam.tokens[-1] in eos or len(beam.tokens) == longest for beam in candidates]
        if self.criteria:
            prompt = self.prompts.padded[index].tolist()
            ids = torch.tensor([[*prompt, *beam.tokens] for beam in candidates])
            scores = tuple(self.scores) if self.resolved.output_scores else None
            for criterion in self.criteria:
                said = torch.as_tensor(criterion(ids, scores)).expand(len(candidates)).tolist()
                ended = [end or bool(more) for end, more in zip(ended, said)]
        return ended

    def _output(self) -> Tensor | GenerateBeamDecoderOnlyOutput:
        count, num_beams = self.resolved.num_return_sequences, self.options.num_beams
        answers = [(index, beam) for index, beams in enumerate(self.beams) for beam in beams.answers[:count]]
        padded = self.prompts.padded.repeat_interleave(count, dim=0)
        sequences = torch.cat((padded, _filled([a.tokens for _, a in answers], self.pad).to(padded.device)), dim=1)
        if not self.resolved.return_dict_in_generate:
            return sequences
        origins = _filled([[i * num_beams + origin for origin in a.origins] for i, a in answers], -1)
        scores = torch.tensor([a.score for _, a in answers], dtype=torch.float32)
        return GenerateBeamDecoderOnlyOutput(
            sequences=sequences,
            sequences_scores=scores.to(padded.device) if self.resolved.output_scores else None,
            scores=tuple(self.scores) if self.resolved.output_scores else None,
            logits=tuple(self.logits) if self.resolved.output_logits else None,
            beam_indices=origins.to(padded.device),
            logprobs=self._logprobs(sequences, origins) if self.resolved.output_logprobs else None,
        )

    def _logprobs(self, sequences: Tensor, origins: Tensor) -> Tensor:
        """[N, S]: log-probability of each generated token; 0 after an answer's end."""
        device = self.logits[0].device
        tokens, origins = sequences[:, self.prompts.width :].to(device), origins.to(device)
        columns = zip(self.logits, origins.clamp(min=0).T, tokens.T)
        chosen = torch.stack([logits.log_softmax(-1)[rows, column] for logits, rows, column in columns], dim=1)
        return chosen.masked_fill(origins < 0, 0.0)


def _filled(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """[N, longest], int64."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
