"""Runs the model for the engine: prompts as one flat stream, decode steps as one captured graph each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cuformers.cuda import graphs
from cuformers.engine.capacity import Capacity
from cuformers.engine.request import Request
from cuformers.engine.state import Rows, idle_rows
from cuformers.nn.attention.backend import AttentionBackend
from cuformers.nn.cache import PagedCache
from cuformers.nn.decoder import CausalLM
from cuformers.nn.step import CacheView, Step, full_step

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
            num_layers=len(specs),
            num_pages=capacity.pages,
            num_kv_heads=specs[0].num_kv_heads,
            head_dim=specs[0].head_dim,
            page_size=page_size,
            dtype=weight.dtype,
            device=self.device,
        )
        self.rows = idle_rows(capacity, page_size, self.device)
        model.model.rotary.reserve(capacity.length, self.device)
        self._graphs: dict[tuple[int, Mode], graphs.CapturedGraph[Tensor]] = {}
        self._pool = graphs.new_pool() if use_graphs else None
        self.captures = 0

    def prefill(self, requests: Sequence[Request]) -> Tensor:
        """Computes requests from their tokens and fills the cache: logits [N, V] of each one's last token."""
        contexts = [r.context for r in requests]
        lengths = tuple(len(c) for c in contexts)
        tokens = torch.tensor([t for c in contexts for t in c], dtype=torch.int32)
        positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
        slots = torch.cat([self._slots(r.pages, n) for r, n in zip(requests, lengths)])
        stream = torch.stack((tokens, positions, slots)).to(self.device, non_blocking=True)
        tables = torch.empty(0, dtype=torch.int32, device=self.device)
        view = CacheView(self.cache, tables, stream[2])
        step = full_step(stream[1], lengths, self.backend, view)
        hidden = self.model.model(stream[0], step)
        assert step.cu_seqlens is not None
        return self.model.logits(hidden[(step.cu_seqlens[1:] - 1).long()])

    def _slots(self, pages: list[int], length: int) -> Tensor:
        first = torch.tensor(pages, dtype=torch.int32)[:, None] * self.page_size
        return (first + torch.arange(self.page_size, dtype=torch.int32)).flatten()[:length]

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
