"""Runs the model for the engine: prompts as one flat stream, decode steps as one captured graph each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cuformers.cuda import graphs
from cuformers.engine.capacity import Capacity
from cuformers.engine.prefill import PrefillInput, PrefillSize, layout, pack
from cuformers.engine.request import Request
from cuformers.engine.state import Rows, idle_rows
from cuformers.nn.attention.backend import AttentionBackend
from cuformers.nn.cache import PagedCache
from cuformers.nn.decoder import CausalLM
from cuformers.nn.step import CacheView, Step

PAGE_SIZE = 64
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What a decode step does after the logits; each mode has its own graphs."""

    sample: bool
    """Draw and take in the next token; else the step ends with the logits."""
    greedy: bool = False
    """Every row takes the largest logit."""


class Runner:
    """The model, its cache and its decode rows, for one capacity."""

    def __init__(
        self, model: CausalLM, backend: AttentionBackend, capacity: Capacity, *, use_graphs: bool, page_size: int
    ) -> None:
        weight = model.lm_head.weight
        self.model, self.backend, self.capacity = model, backend, capacity
        self.device, self.page_size = weight.device, page_size
        specs = model.model.attention_specs
        self.cache = PagedCache(
            devices=model.model.layer_devices,
            num_pages=capacity.pages,
            num_kv_heads=specs[0].num_kv_heads,
            head_dim=specs[0].head_dim,
            page_size=page_size,
            dtype=weight.dtype,
        )
        self.rows = idle_rows(capacity, page_size, self.device)
        model.model.rotary.reserve(capacity.length, self.device)
        self._no_tables = torch.empty(0, dtype=torch.int32, device=self.device)
        self._prefill_graphs = use_graphs and backend.can_capture(model.attention_problem)
        self._inputs: dict[PrefillSize, Tensor | None] = {}
        self._prefills: dict[PrefillSize, graphs.CapturedGraph[Tensor]] = {}
        self._graphs: dict[tuple[int, Mode], graphs.CapturedGraph[Tensor]] = {}
        self._pool = graphs.new_pool() if use_graphs else None
        self.captures = 0

    def prefill(self, requests: Sequence[Request]) -> Tensor:
        """Computes requests from their tokens and fills the cache: logits [N, V] of each one's last token.

        The second prefill of a size is captured; the result is overwritten by the next prefill.
        """
        lengths = tuple(len(r.context) for r in requests)
        size = PrefillSize.of(sum(lengths), len(lengths)) if self._prefill_graphs else None
        if size is None or size not in self._inputs:
            exact = PrefillSize(tokens=sum(lengths), sequences=len(lengths))
            packed = pack(requests, exact, self.page_size).to(self.device, non_blocking=True)
            if size is not None:
                self._inputs[size] = None
            return self._prefill(layout(exact, packed), lengths)
        packed = pack(requests, size, self.page_size)
        held = self._inputs[size]
        if held is None:
            held = self._inputs[size] = packed.to(self.device)
            read = layout(size, held)
            self._prefills[size] = graphs.capture(
                lambda: self._prefill(read, None), self._pool, device=self.device, warm_ups=1
            )
            self.captures += 1
        held.copy_(packed, non_blocking=True)
        captured = self._prefills[size]
        captured.replay()
        return captured.result[: len(requests)]

    def _prefill(self, read: PrefillInput, lengths: tuple[int, ...] | None) -> Tensor:
        """Logits [N, V]; `lengths` are None where only the device may know them."""
        tokens = read.tokens.numel()
        step = Step(
            phase="full",
            positions=read.positions,
            lengths=read.bounds.diff(),
            cu_seqlens=read.bounds,
            query_lengths=lengths,
            longest=tokens if lengths is None else max(lengths),
            backend=self.backend,
            cache=CacheView(self.cache, self._no_tables, read.slots),
        )
        hidden = self.model.model(read.tokens, step)
        return self.model.logits(hidden[read.last.long()])

    def decode(self, count: int, mode: Mode) -> Tensor:
        """One step of the first `count` rows: the sampled tokens [size], or the logits [size, V].

        Runs over the next graph size; rows beyond `count` are idle. The first step of a size and mode runs without a
        graph, which compiles what needs compiling, and is then recorded. The result is overwritten by the next step.
        """
        size = next(s for s in (*GRAPH_SIZES, self.capacity.slots) if s >= count)
        size = min(size, self.capacity.slots)
        captured = self._graphs.get((size, mode))
        if captured is not None:
            captured.replay()
            return captured.result
        result = self._decode(size, mode)
        if self._pool is not None:
            self._graphs[size, mode] = graphs.capture(
                lambda: self._decode(size, mode), self._pool, device=self.device, warm_ups=0
            )
            self.captures += 1
        return result

    def _decode(self, size: int, mode: Mode) -> Tensor:
        rows = self.rows.cut(0, size)
        state = rows.decode
        view = CacheView(self.cache, state.block_tables, state.slots)
        step = Step(phase="decode", positions=state.positions, lengths=state.lengths, cache=view)
        logits = self.model.logits(self.model.model(state.tokens, step))
        return self.sample(logits, rows, mode.greedy) if mode.sample else logits

    def sample(self, logits: Tensor, rows: Rows, greedy: bool) -> Tensor:
        """Draws the next token of each row and takes it into the rows' state: tokens [B]."""
        ops, state = self.model.ops, rows.decode
        if greedy:
            sampled = ops.argmax(logits)
        else:
            sampled = ops.sample(logits, *rows.sampling, state.positions.long())
        ops.advance(sampled, state)
        return sampled
