"""The engine: every generation runs here.

The host runs ahead of the device: it launches step after step and looks at the tokens one or two steps late, as the
device itself takes each token into the next step, and ends rows by itself. All work of an engine is on one stream, in
order: what a step reads may be handed on as soon as the step has been launched.
"""

from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock

import torch
from torch import nn

from cuformers.cuda import memory
from cuformers.cuda.device import on
from cuformers.engine.cache_dtype import wants_fp8
from cuformers.engine.capacity import PAGE_SIZE, Capacity, needed, wanted
from cuformers.engine.draft_model import check_draft, page_bytes
from cuformers.engine.launch import launch
from cuformers.engine.logprobs import check_wanted, report, report_prompts
from cuformers.engine.mail import Letter, Mail, Owner
from cuformers.engine.planner import WATERMARK, Planner
from cuformers.engine.postbox import SLOTS
from cuformers.engine.profile import step_bytes
from cuformers.engine.request import Drafts, Finish, Request
from cuformers.engine.runner import Runner
from cuformers.kernels.cache_scales import FP8
from cuformers.nn.attention.backend import AttentionBackend
from cuformers.nn.cache import CacheLayout, PagedCache, layout
from cuformers.nn.decoder import CausalLM

LAG = 2
"""Steps that the host may be ahead of the tokens it has seen."""


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
        draft: CausalLM | None = None,
        watermark: float = WATERMARK,
        host_bytes: int = 0,
        kv_cache_dtype: str = "auto",
    ) -> None:
        """
        Args:
            model: whose weights are used where they are.
            backend: computes prompts that need nothing from the cache; None leaves them to the op that reads it.
            use_graphs: None decides by the device.
            max_batch_tokens: tokens of a step at the most.
            prefix_cache: keep the keys of prompts that have ended, for those that begin alike.
            draft: a small model that guesses tokens for requests with `drafts`; None looks them up.
            watermark: share of the cache that a new request leaves free where others run.
            host_bytes: of the host's memory, to keep the keys of requests that give way to others; without, or where
                they do not fit, they are computed anew.
            kv_cache_dtype: of the cache: "auto", the model's own, or "fp8_e4m3" ("fp8"), half the bytes. Prompts that
                `backend` computes see their own keys as they were before they were rounded: their tokens may differ
                from those of a prompt that is computed in chunks or found in the cache.

        Raises:
            ValueError: one of the models has layers that carry a state; the small one can't guess for this one; fp8 is
                not possible here.
        """
        for one in (model, draft):
            reason = None if one is None else why_no_engine(one)
            if reason is not None:
                raise ValueError(reason)
        if draft is not None:
            check_draft(draft, model)
        self.model, self.backend, self.draft = model, backend, draft
        self.fp8_cache = wants_fp8(kv_cache_dtype, self._models)
        self.device = model.lm_head.weight.device
        self.use_graphs = use_graphs
        self.lag = LAG if self.device.type == "cuda" else 0
        self.host_bytes = host_bytes
        self.max_batch_tokens, self.prefix_cache, self.watermark = max_batch_tokens, prefix_cache, watermark
        self.runner: Runner | None = None
        self.planner: Planner | None = None
        self._weights: tuple[object, ...] = ()
        self._letters: deque[Letter] = deque()
        self._mail = Mail(self.device)
        self._turn, self._running = RLock(), False
        self._drafts: Drafts | None = None

    def run(self, requests: Sequence[Request], *, keep_cache: bool = False) -> None:
        """Runs requests to their ends. Another thread's run is waited for.

        Args:
            requests: the work.
            keep_cache: go on where the run before ended: its keys are found, as the weights are still the same, and
                its buffers hold this work too.

        Raises:
            ValueError: a request could never run; nothing was run then.
            RuntimeError: called by what a run calls, such as a streamer.
        """
        with self._turn:
            if self._running:
                raise RuntimeError("generate was called from within a generate of the same model: let it end first.")
            self._running = True
            try:
                self._run(requests, keep_cache)
            finally:
                self._running = False

    def _run(self, requests: Sequence[Request], keep_cache: bool) -> None:
        if not keep_cache:
            self.reserve(requests)
        assert self.planner is not None, "keep_cache needs a run before"
        if not keep_cache:
            self.planner.new_epoch()  # the weights may have been trained since
        try:
            for request in requests:
                self.add(request)
            self._guess(_drafts_for(requests))
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
        check_wanted(request, self.model.lm_head.out_features)
        plain = request.group is None or request.group.plain
        assert plain or request.penalties is None, "the processors of a group do its penalties too"
        switch = self.model.model.rotary.switch_length
        request.breakpoint = switch if switch and switch < request.max_length else None
        if not self.planner.busy:
            self._guess(_drafts_for([request]))
        self.planner.add(request)

    def _guess(self, drafts: Drafts | None) -> None:
        """Says how the tokens of all that runs are guessed, before anything runs; it changes no answer."""
        assert self.planner is not None
        self._drafts, self.planner.drafts = drafts, drafts.count if drafts else 0

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is."""
        self._end(request, Finish.CANCELLED)

    @torch.no_grad()
    def step(self) -> bool:
        """Starts the next step, and looks at the tokens of one that was started before; False when nothing is to do."""
        with on(self.device):
            return self._step()

    def _step(self) -> bool:
        assert self.runner is not None and self.planner is not None, "reserve comes before step"
        plan = self.planner.plan(settled=not self._letters)
        launched = plan is not None and not plan.wait
        if plan is not None and launched:
            assert len(self._letters) < SLOTS, "a letter's slot is not used again before it is read"
            self._letters.append(self._mail.send(*launch(self.runner, self.planner, plan, self._drafts)))
        if self._letters and (not launched or len(self._letters) > self.lag):
            self._collect(self.planner)
            return True
        return launched

    def reset(self) -> None:
        """Drops all work after an error: every request ends as failed, all rows are idle."""
        self._letters.clear()
        if self.planner is None:
            return
        for request in self.planner.requests():
            self.planner.finish(request)
            if request.finish is None:
                request.end(Finish.FAILED)
        self.planner.new_epoch()  # what was launched may never have been computed
        if self.runner is not None:
            self.runner.reset()

    def _collect(self, planner: Planner) -> None:
        """Waits for the oldest letter, and hands its tokens to their requests."""
        letter = self._letters.popleft()
        tokens = self._mail.read(letter)
        if letter.prompt_logprobs is not None:
            report_prompts(letter.stretches, letter.prompt_logprobs)
        for owner in letter.owners:
            request = owner.request
            if request.finish is not None or request.target != owner.target:
                continue
            if request.logprobs is not None and letter.logprobs is not None:
                report(request, letter.logprobs, owner.index, request.logprobs)
            self._take_all(planner, owner, tokens[owner.index])

    def _take_all(self, planner: Planner, owner: Owner, tokens: list[int]) -> None:
        """Hands over what a row has sampled in one step, and takes back what the planner counted too much."""
        request = owner.request
        new = tokens if len(tokens) == 1 else [token for token in tokens if token >= 0]
        request.computed -= owner.counted - len(new)
        for token in new:
            if request.finish is None:
                self._take(planner, request, token)

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
        if self._fits(lambda runner: wanted(requests, runner.cache.layout)):
            return
        groups = self._layout()
        page = self._page_bytes(groups)
        page += 0 if self.draft is None else page_bytes(self.draft, PAGE_SIZE, self.fp8_cache)
        held = self.runner.cache_bytes if self.runner else 0
        free = memory.free_bytes(self.device) + held
        need = needed(requests, groups, page, free)
        if need.pages * page > free // 2 and not (self.runner and self.runner.capacity.covers(need)):
            need = needed(requests, groups, page, free - self.beside_cache(need))
        self.configure(need)

    def beside_cache(self, capacity: Capacity) -> int:
        """Bytes to leave free beside the cache: twice what the largest step takes, as captured steps have their own."""
        self.runner = None
        sizes = (capacity, self._layout(), self.max_batch_tokens)
        return 2 * step_bytes(self.model, self.backend, *sizes, fp8_cache=self.fp8_cache)

    def configure(self, need: Capacity) -> None:
        """Makes the buffers hold at least so much. What runs is computed anew where they have to be made anew."""
        if self._fits(lambda _: need):
            return
        capacity = need.joined(self.runner.capacity) if self.runner else need
        self._plan_anew(capacity)
        self.runner = None  # gives its memory back before the next one takes some
        self.runner = Runner(
            self.model,
            self.backend,
            capacity,
            self._layout(),
            use_graphs=self.captures,
            page_size=PAGE_SIZE,
            draft=self.draft,
            host_places=self._host_places,
            fp8_cache=self.fp8_cache,
        )

    def _fits(self, need: Callable[[Runner], Capacity]) -> bool:
        """Whether the buffers hold what is needed already; a runner whose weights are others now is dropped."""
        weights = self._current_weights()
        if weights != self._weights:
            self.runner, self._weights = None, weights
        return self.runner is not None and self.runner.capacity.covers(need(self.runner))

    def release(self) -> None:
        """Frees the cache, the table and the captured steps; until `configure` what waits or runs waits."""
        if self.runner is not None:
            self._plan_anew(self.runner.capacity)
            self.runner = None

    def forget(self, *, restart: bool) -> None:
        """Shares nothing any more that was computed so far; with `restart` what runs is computed anew."""
        assert self.planner is not None, "configure comes before forget"
        left = self._withdrawn() if restart else []
        self.planner.new_epoch()
        for request in left:
            self.planner.add(request)

    def _plan_anew(self, capacity: Capacity) -> None:
        """Makes a planner that has nothing cached; all that waits or runs is queued there, with its tokens so far."""
        left = self._withdrawn()
        self.planner = Planner(
            num_rows=capacity.rows,
            num_blocks=capacity.pages,
            block_size=PAGE_SIZE,
            windows=self._layout().windows,
            max_batch_tokens=self.max_batch_tokens,
            prefix_cache=self.prefix_cache and not self.model.model.rotary.depends_on_length,
            watermark=self.watermark,
            host_places=self._host_places,
        )
        self._guess(self._drafts)
        for request in left:
            self.planner.add(request)

    def _withdrawn(self) -> list[Request]:
        """Takes back all that waits or runs, in order; each request keeps the tokens so far."""
        if self.planner is None:
            return []
        while self._letters:
            self._collect(self.planner)
        requests = self.planner.requests()
        for request in requests:
            self.planner.cancel(request)
        return requests

    @property
    def captures(self) -> bool:
        """Whether steps are captured: by default on a GPU, with kernels that can be."""
        wanted = self.device.type == "cuda" if self.use_graphs is None else self.use_graphs
        return wanted and all(model.ops.can_capture for model in self._models)

    @property
    def _host_places(self) -> int:
        """Pages that the host keeps."""
        return self.host_bytes // self._page_bytes(self._layout())

    def _page_bytes(self, groups: CacheLayout) -> int:
        spec = self.model.model.attention_specs[0]
        dtype = FP8 if self.fp8_cache else self.model.lm_head.weight.dtype
        return PagedCache.page_bytes(groups.size, spec.num_kv_heads, spec.head_dim, PAGE_SIZE, dtype)

    def _layout(self) -> CacheLayout:
        devices = self.model.model.layer_devices
        return layout([spec.window for spec in self.model.model.attention_specs], apart=len(set(devices)) == 1)

    def _current_weights(self) -> tuple[object, ...]:
        places = (place for model in self._models for place in _places(model))
        return (*(model.ops for model in self._models), self.backend, *places)

    @property
    def _models(self) -> tuple[CausalLM, ...]:
        return (self.model,) if self.draft is None else (self.model, self.draft)


def why_no_engine(model: CausalLM) -> str | None:
    """The reason why no engine can generate for a model; None where one can."""
    if model.model.attention_specs:
        return None
    return (
        f"{type(model).__name__} can't generate yet: its layers carry a state from token to token, and the engine "
        "keeps keys and values only. model(input_ids) computes its logits, and training works."
    )


def _places(model: nn.Module) -> list[int]:
    """Addresses of the weights. Every call of generate asks, and `model.parameters()` takes a millisecond."""
    found: list[int] = []
    left = [model]
    while left:
        module = left.pop()
        found += [p.data_ptr() for p in module._parameters.values() if p is not None]
        left += [child for child in module._modules.values() if child is not None]
    return found


def _drafts_for(requests: Sequence[Request]) -> Drafts | None:
    """How to guess tokens of all of these: not where a processor must know how far its rows are."""
    if any(r.group is not None and r.group.rectangular for r in requests):
        return None
    return max((r.drafts for r in requests if r.drafts is not None), key=lambda d: d.count, default=None)
