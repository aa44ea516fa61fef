"""The engine: every generation runs here.

The host runs ahead of the device: it launches step after step and looks at the tokens one or two steps late, as the
device itself takes each token into the next step, and ends rows by itself.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.cuda import memory, streams
from cuformers.engine.capacity import needed
from cuformers.engine.group import Group
from cuformers.engine.request import Finish, Request
from cuformers.engine.runner import PAGE_SIZE, Mode, Runner
from cuformers.engine.scheduler import Scheduler
from cuformers.engine.state import Rows, fresh_rows, put_rows
from cuformers.nn.attention.backend import AttentionBackend
from cuformers.nn.cache import PagedCache
from cuformers.nn.decoder import CausalLM

MAX_PREFILL_TOKENS = 16384
LAG = 2
"""Steps that the host may be ahead of the tokens it has seen."""
Launched = dict[Request, int]
"""Tokens of each request whose step has started."""


class _Flight(NamedTuple):
    """A step on its way: its tokens, and whose they are."""

    tokens: Tensor
    done: streams.Event
    owners: list[tuple[int, Request]]


class Engine:
    """Generates for one model. Buffers and graphs stay between calls, and grow with the work."""

    def __init__(self, model: CausalLM, backend: AttentionBackend, *, use_graphs: bool | None = None) -> None:
        self.model, self.backend = model, backend
        self.device = model.lm_head.weight.device
        self.on_gpu = self.device.type == "cuda"
        self.use_graphs = self.on_gpu if use_graphs is None else use_graphs
        self.runner: Runner | None = None
        self._weights: tuple[object, ...] = ()
        self._buffers: list[tuple[Tensor, streams.Event]] = []

    @torch.no_grad()
    def run(self, requests: Sequence[Request], groups: Sequence[Group] = (Group(),)) -> None:
        """Runs requests to their ends; `request.group` is an index into `groups`.

        Raises:
            ValueError: a request could never run; nothing was run then.
        """
        runner = self._ready(requests)
        scheduler = Scheduler(
            num_slots=runner.capacity.slots,
            num_pages=runner.capacity.pages,
            page_size=PAGE_SIZE,
            max_prefill_tokens=MAX_PREFILL_TOKENS,
        )
        switch = self.model.model.rotary.switch_length
        for request in requests:
            request.breakpoint = switch if switch and len(request.prompt) < switch < request.max_length else None
            scheduler.add(request)
        lag = LAG if self.on_gpu else 0
        flights: deque[_Flight] = deque()
        launched: Launched = {}
        try:
            while scheduler.busy:
                tokens, owners = self._launch(runner, scheduler, groups, launched)
                if owners:
                    flights.append(self._send(tokens, owners))
                if not owners or len(flights) > lag:
                    self._collect(flights.popleft(), runner, scheduler)
        finally:
            self._clear(runner)

    def _launch(
        self, runner: Runner, scheduler: Scheduler, groups: Sequence[Group], launched: Launched
    ) -> tuple[Tensor, list[tuple[int, Request]]]:
        """Starts the next step, if there is one: its tokens, and the rows of them that matter."""
        admitted = scheduler.admit()
        if admitted:
            tokens = self._prefill(runner, admitted, groups, launched)
            owners = list(enumerate(admitted))
        else:
            running = scheduler.running.items()
            owners = [(slot, r) for slot, r in sorted(running) if launched[r] < r.limit - len(r.prompt)]
            if not owners:
                return torch.empty(0), []
            tokens = self._decode(runner, owners, groups, launched)
        for _, request in owners:
            launched[request] = launched.get(request, 0) + 1
        return tokens, owners

    def _prefill(
        self, runner: Runner, requests: list[Request], groups: Sequence[Group], launched: Launched
    ) -> Tensor:
        fresh = fresh_rows(requests, runner.capacity, runner.page_size, self.device)
        logits = runner.prefill(requests)
        scores = self._process(logits, fresh, list(enumerate(requests)), groups, launched)
        tokens = runner.sample(scores, fresh, _greedy(requests))
        put_rows(runner.rows, fresh, [r.slot for r in requests])
        return tokens

    def _decode(
        self, runner: Runner, owners: list[tuple[int, Request]], groups: Sequence[Group], launched: Launched
    ) -> Tensor:
        requests = [r for _, r in owners]
        count, greedy = owners[-1][0] + 1, _greedy(requests)
        if all(groups[r.group].plain for r in requests):
            return runner.decode(count, Mode(sample=True, greedy=greedy))
        logits = runner.decode(count, Mode(sample=False))
        rows = runner.rows.cut(0, logits.shape[0])
        scores = self._process(logits, rows, owners, groups, launched)
        return runner.sample(scores, rows, greedy)

    def _process(
        self, logits: Tensor, rows: Rows, owners: list[tuple[int, Request]], groups: Sequence[Group], launched: Launched
    ) -> Tensor:
        """Scores for the sampler: rows of each group through its processors, the others as they are."""
        parts: dict[int, list[tuple[int, Request]]] = {}
        for row, request in owners:
            if not groups[request.group].plain:
                parts.setdefault(request.group, []).append((row, request))
        if not parts:
            return logits
        scores = logits.float()
        for group, own in parts.items():
            place = torch.tensor([row for row, _ in own]).to(self.device, non_blocking=True)
            state, requests = rows.decode.picked(place), [r for _, r in own]
            generated = [launched.get(r, 0) for r in requests]
            bound = max(len(r.prompt) + n for r, n in zip(requests, generated))
            new = groups[group].process(logits[place], state, requests, bound, generated)
            scores = scores.index_copy(0, place, new)
        return scores

    def _send(self, tokens: Tensor, owners: list[tuple[int, Request]]) -> _Flight:
        """Starts the copy of a step's tokens to the host."""
        buffer, done = self._buffers.pop() if self._buffers else self._new_buffer()
        buffer[: tokens.shape[0]].copy_(tokens, non_blocking=True)
        done.record()
        return _Flight(buffer, done, owners)

    def _new_buffer(self) -> tuple[Tensor, streams.Event]:
        assert self.runner is not None
        buffer = streams.pinned_empty((self.runner.capacity.slots,), torch.int64)
        return buffer, streams.event(self.device)

    def _collect(self, flight: _Flight, runner: Runner, scheduler: Scheduler) -> None:
        """Waits for a step's tokens and hands them to their requests."""
        flight.done.synchronize()
        tokens = flight.tokens.tolist()
        self._buffers.append((flight.tokens, flight.done))
        for row, request in flight.owners:
            if request.finish is not None:
                continue
            request.take(tokens[row])
            if request.finish is None:
                if len(request.context) == request.breakpoint:
                    scheduler.again(request)
                continue
            if request.finish is Finish.STOPPED:  # the device knows of the other ends by itself
                runner.rows.decode.lengths[request.slot].zero_()
                runner.rows.decode.slots[request.slot].fill_(-1)
            scheduler.release(request)

    def _clear(self, runner: Runner) -> None:
        """All rows idle: after an error or an interrupt some may still be busy."""
        runner.rows.decode.lengths.zero_()
        runner.rows.decode.slots.fill_(-1)

    def _ready(self, requests: Sequence[Request]) -> Runner:
        """The runner, made anew where the work outgrew it or the model's weights moved."""
        weights = (id(self.model.ops), *(p.data_ptr() for p in self.model.parameters()))
        if weights != self._weights:
            self.runner, self._weights = None, weights
        spec = self.model.model.attention_specs
        dtype = self.model.lm_head.weight.dtype
        page = PagedCache.page_bytes(len(spec), spec[0].num_kv_heads, spec[0].head_dim, PAGE_SIZE, dtype)
        held = self.runner.cache.nbytes if self.runner else 0
        need = needed(requests, PAGE_SIZE, page, memory.free_bytes(self.device) + held)
        if self.runner is None or not self.runner.capacity.covers(need):
            capacity = need.joined(self.runner.capacity) if self.runner else need
            self.runner, self._buffers = None, []
            self.runner = Runner(
                self.model, self.backend, capacity, use_graphs=self.use_graphs, page_size=PAGE_SIZE
            )
        return self.runner


def _greedy(requests: Sequence[Request]) -> bool:
    return all(r.sampling.temperature == 0 for r in requests)
