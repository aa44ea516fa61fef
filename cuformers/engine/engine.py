"""The engine: every generation runs here.

The host runs ahead of the device: it launches step after step and looks at the tokens one or two steps late, as the
device itself takes each token into the next step, and ends rows by itself. All work of an engine is on one stream, in
order: what a step reads may be handed on as soon as the step has been launched.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.cuda import memory, streams
from cuformers.engine.capacity import PAGE_SIZE, Capacity, needed
from cuformers.engine.logprobs import (
    PromptTargets,
    Stretch,
    check_wanted,
    prompt_targets,
    report,
    report_prompts,
    top_size,
)
from cuformers.engine.plan import StepPlan
from cuformers.engine.planner import Planner
from cuformers.engine.request import Finish, Request
from cuformers.engine.runner import Mode, Output, Runner
from cuformers.engine.state import write_rows, write_tables
from cuformers.engine.step_size import ROW_SIZES
from cuformers.kernels.logprobs import Logprobs
from cuformers.nn.attention.backend import AttentionBackend
from cuformers.nn.cache import CacheLayout, PagedCache, layout
from cuformers.nn.decoder import CausalLM

LAG = 2
"""Steps that the host may be ahead of the tokens it has seen."""


class _Flight(NamedTuple):
    """A step on its way: its tokens, and whose they are."""

    tokens: Tensor
    done: streams.Event
    owners: list[tuple[int, Request]]
    logprobs: Logprobs | None
    stretches: tuple[Stretch, ...]
    """Of prompts that the step tells of."""
    prompt_logprobs: Logprobs | None


class Engine:
    """Generates for one model. Buffers and graphs stay between calls, and grow with the work while it is idle."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend | None = None,
        *,
        use_graphs: bool | None = None,
        max_batch_tokens: int = 8192,
        prefix_cache: bool = True,
    ) -> None:
        """
        Args:
            model: whose weights are used where they are.
            backend: computes prompts that need nothing from the cache; None leaves them to the op that reads it.
            use_graphs: None decides by the device.
            max_batch_tokens: tokens of a step at the most.
            prefix_cache: keep the keys of prompts that have ended, for those that begin alike.
        """
        self.model, self.backend = model, backend
        self.device = model.lm_head.weight.device
        self.use_graphs = use_graphs
        self.lag = LAG if self.device.type == "cuda" else 0
        self.max_batch_tokens, self.prefix_cache = max_batch_tokens, prefix_cache
        self.runner: Runner | None = None
        self.planner: Planner | None = None
        self._weights: tuple[object, ...] = ()
        self._flights: deque[_Flight] = deque()
        self._buffers: list[tuple[Tensor, streams.Event]] = []

    def run(self, requests: Sequence[Request], *, keep_cache: bool = False) -> None:
        """Runs requests to their ends.

        Args:
            requests: the work.
            keep_cache: go on where the run before ended: its keys are found, as the weights are still the same, and
                its buffers hold this work too.

        Raises:
            ValueError: a request could never run; nothing was run then.
        """
        if not keep_cache:
            self.reserve(requests)
        assert self.planner is not None, "keep_cache needs a run before"
        if not keep_cache:
            self.planner.new_epoch()  # the weights may have been trained since
        try:
            for request in requests:
                self.add(request)
            while self.step():
                pass
        except BaseException:
            self.reset()
            raise

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: it could never run.
        """
        assert self.planner is not None, "reserve comes before add"
        check_wanted(request)
        switch = self.model.model.rotary.switch_length
        request.breakpoint = switch if switch and switch < request.max_length else None
        self.planner.add(request)

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is."""
        self._end(request, Finish.CANCELLED)

    @torch.no_grad()
    def step(self) -> bool:
        """Starts the next step, and looks at the tokens of one that was started before; False when nothing is to do."""
        assert self.runner is not None and self.planner is not None, "reserve comes before step"
        plan = self.planner.plan(settled=not self._flights)
        launched = plan is not None and not plan.wait
        if launched:
            self._flights.append(self._launch(self.runner, plan))
        if self._flights and (not launched or len(self._flights) > self.lag):
            self._collect(self.planner)
            return True
        return launched

    def reset(self) -> None:
        """Drops all work after an error: every request ends as failed, all rows are idle."""
        self._flights.clear()
        self._buffers.clear()
        if self.planner is None or self.runner is None:
            return
        for request in self.planner.requests():
            self.planner.finish(request)
            if request.finish is None:
                request.end(Finish.FAILED)
        state = self.runner.table.decode
        state.lengths.zero_()
        state.slots.fill_(-1)

    def _launch(self, runner: Runner, plan: StepPlan) -> _Flight:
        table = runner.table
        if plan.idle:
            table.decode.idle(streams.upload(plan.idle, torch.int64, self.device))
        if plan.admitted:
            write_rows(table, plan.admitted)
        write_tables(table.decode.block_tables, plan.tables)
        count = self._compacted(runner, plan)
        targets = prompt_targets(plan.chunks, self.device)
        output = self._run(runner, plan, count, targets)
        owners = [(i, chunk.request) for i, chunk in enumerate(plan.chunks) if chunk.final]
        owners += [(output.first_row + request.row, request) for request in plan.decodes]
        return self._send(output, owners, targets.stretches if targets is not None else ())

    def _compacted(self, runner: Runner, plan: StepPlan) -> int:
        """Rows that the step must compute. Where that is many more than decode, the last ones move to free rows."""
        if not plan.decodes:
            return 0
        planner = self.planner
        assert planner is not None
        count = plan.decodes[-1].row + 1
        fits = next((size for size in ROW_SIZES if size >= planner.num_running), count)
        if count <= fits or not planner.can_compact(fits):
            return count
        moves = planner.compact(fits)
        source, target = (streams.upload(rows, torch.int64, self.device) for rows in zip(*moves))
        runner.table.move(source, target)
        return max(request.row for request in plan.decodes) + 1

    def _run(self, runner: Runner, plan: StepPlan, count: int, targets: PromptTargets | None) -> Output:
        requests = [chunk.request for chunk in plan.chunks if chunk.final] + list(plan.decodes)
        mode = _mode(requests)
        if all(r.group is None or r.group.plain for r in requests):
            return runner.step(plan.chunks, count, mode, targets)
        output = runner.step(plan.chunks, count, Mode(sample=False), targets)
        owners = [(i, chunk.request) for i, chunk in enumerate(plan.chunks) if chunk.final]
        owners += [(output.first_row + request.row, request) for request in plan.decodes]
        return runner.finish(output, mode, self._process(runner, output.logits, owners))

    def _process(self, runner: Runner, logits: Tensor, owners: list[tuple[int, Request]]) -> Tensor:
        """Scores for the sampler: rows of each group through its processors, the others as they are."""
        parts: dict[int, list[tuple[int, Request]]] = {}
        for index, request in owners:
            if request.group is not None and not request.group.plain:
                parts.setdefault(id(request.group), []).append((index, request))
        scores = logits.float()
        for own in parts.values():
            requests = [r for _, r in own]
            group = requests[0].group
            assert group is not None
            place = streams.upload([index for index, _ in own], torch.int64, self.device)
            rows = streams.upload([r.row for r in requests], torch.int64, self.device)
            state = runner.table.decode.picked(rows)
            bound = max(r.computed for r in requests)
            generated = [r.computed - len(r.prompt) for r in requests] if group.rectangular else None
            new = group.process(logits[place], state, requests, bound, generated)
            scores = scores.index_copy(0, place, new)
        return scores

    def _send(
        self, output: Output, owners: list[tuple[int, Request]], stretches: tuple[Stretch, ...]
    ) -> _Flight:
        """Starts the copy of what a step says to the host."""
        assert output.tokens is not None
        count = output.tokens.shape[0]
        buffer, done = self._buffers.pop() if self._buffers else (None, streams.event(self.device))
        if buffer is None or buffer.shape[0] < count:
            buffer = streams.pinned_empty((max(count, 512),), torch.int64)
        buffer[:count].copy_(output.tokens, non_blocking=True)
        logprobs, prompt_logprobs = _downloaded(output.logprobs), _downloaded(output.prompt_logprobs)
        done.record()
        return _Flight(buffer, done, owners, logprobs, stretches, prompt_logprobs)

    def _collect(self, planner: Planner) -> None:
        """Waits for the tokens of the oldest step on its way, and hands them to their requests."""
        flight = self._flights.popleft()
        flight.done.synchronize()
        tokens = flight.tokens.tolist()
        self._buffers.append((flight.tokens, flight.done))
        if flight.prompt_logprobs is not None:
            report_prompts(flight.stretches, flight.prompt_logprobs)
        for index, request in flight.owners:
            if request.finish is None:
                if request.logprobs is not None and flight.logprobs is not None:
                    report(request, flight.logprobs, index, request.logprobs)
                self._take(planner, request, tokens[index])

    def _take(self, planner: Planner, request: Request, token: int) -> None:
        finish = request.take(token)
        if finish is not None:
            self._end(request, finish)
        elif request.total == request.breakpoint:
            planner.again(request)
        elif request.total % planner.block_size == 0:
            planner.seen(request)

    def _end(self, request: Request, finish: Finish) -> None:
        """The device knows of the ends by token and by length; of the others the next plan tells it."""
        assert self.planner is not None
        if request.finish is not None:
            return
        if finish in (Finish.EOS, Finish.LENGTH):
            self.planner.finish(request)
        else:
            self.planner.cancel(request)
        request.end(finish)

    def reserve(self, requests: Sequence[Request]) -> None:
        """Makes the buffers large enough for these requests, while nothing runs.

        Raises:
            OutOfDeviceMemory: the cache for the longest of them does not fit.
        """
        groups, spec = self._layout(), self.model.model.attention_specs[0]
        dtype = self.model.lm_head.weight.dtype
        page = PagedCache.page_bytes(groups.size, spec.num_kv_heads, spec.head_dim, PAGE_SIZE, dtype)
        held = self.runner.cache.nbytes if self.runner else 0
        self.configure(needed(requests, groups, page, memory.free_bytes(self.device) + held))

    def configure(self, need: Capacity) -> None:
        """Makes the buffers hold at least so much, while nothing runs."""
        weights = self._current_weights()
        if weights != self._weights:
            self.runner, self._weights = None, weights
        if self.runner is not None and self.runner.capacity.covers(need):
            return
        capacity = need.joined(self.runner.capacity) if self.runner else need
        groups = self._layout()
        self.runner, self.planner, self._buffers = None, None, []
        self.runner = Runner(
            self.model, self.backend, capacity, groups, use_graphs=self.captures, page_size=PAGE_SIZE
        )
        self.planner = Planner(
            num_rows=capacity.rows,
            num_blocks=capacity.pages,
            block_size=PAGE_SIZE,
            windows=groups.windows,
            max_batch_tokens=self.max_batch_tokens,
            prefix_cache=self.prefix_cache and not self.model.model.rotary.depends_on_length,
        )

    @property
    def captures(self) -> bool:
        """Whether steps are captured: by default on a GPU, with kernels that can be."""
        wanted = self.device.type == "cuda" if self.use_graphs is None else self.use_graphs
        return wanted and self.model.ops.can_capture

    def _layout(self) -> CacheLayout:
        devices = self.model.model.layer_devices
        return layout([spec.window for spec in self.model.model.attention_specs], apart=len(set(devices)) == 1)

    def _current_weights(self) -> tuple[object, ...]:
        return (id(self.model.ops), *(p.data_ptr() for p in self.model.parameters()))


def _mode(requests: Sequence[Request]) -> Mode:
    """How a step samples for these requests."""
    greedy = all(r.sampling.temperature == 0 for r in requests)
    wanted = max((r.logprobs for r in requests if r.logprobs is not None), default=None)
    return Mode(sample=True, greedy=greedy, logprobs=None if wanted is None else top_size(wanted))


def _downloaded(logprobs: Logprobs | None) -> Logprobs | None:
    """On its way to the host."""
    return None if logprobs is None else Logprobs(*(streams.download(x) for x in logprobs))
