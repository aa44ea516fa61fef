"""Runs the model for the engine: each step, chunks of prompts and decoding rows alike, as one captured graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.cuda import graphs, streams
from cuformers.engine.attention_plans import attention_plans
from cuformers.engine.capacity import Capacity, power_of_two
from cuformers.engine.draft_model import DraftModel
from cuformers.engine.host_cache import HostCache
from cuformers.engine.logprobs import PromptTargets, score_prompts
from cuformers.engine.postbox import Postbox
from cuformers.engine.request import Drafts
from cuformers.engine.state import idle_rows
from cuformers.engine.step_size import StepSize, Stretch, pack
from cuformers.kernels.cache_scales import FP8
from cuformers.kernels.logprobs import Logprobs
from cuformers.kernels.prepare import ChunkPlan
from cuformers.nn.attention.backend import AttentionBackend
from cuformers.nn.cache import CacheLayout, PagedCache
from cuformers.nn.decoder import CausalLM
from cuformers.nn.step import CacheView, Chunks, Step


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What a step does after the logits; each mode has its own graphs."""

    sample: bool
    """Draw and take in the next token; else the step ends with the logits."""
    greedy: bool = False
    """Every row takes the largest logit."""
    logprobs: int | None = None
    """Report the log-probability of the sampled token, and so many of the likeliest tokens; None: nothing."""
    drafts: Drafts | None = None
    """Guess tokens of each decoding row and take those that are right; for steps without chunks, that sample."""


class Output(NamedTuple):
    """What a step left on the device, to be overwritten by the next step of its size. Row r of it belongs to chunk r
    for r < first_row, then to row r - first_row of the table."""

    first_row: int
    rows: Tensor | None
    """[R], int32: row of the table that takes the sampled token, -1 for none; None: each its own, where busy."""
    logits: Tensor
    """[R, V]."""
    tokens: Tensor | None = None
    """[R], int64: the sampled tokens; with K drafts [R, K + 1], -1 after the last one of a row. None where the step
    ended with the logits."""
    logprobs: Logprobs | None = None
    """Of the sampled tokens by the model's logits, where the mode asks for them."""
    prompt_logprobs: Logprobs | None = None
    """[P] of them, of the step's prompt targets."""
    posted: Tensor | None = None
    """`tokens` on the host, once the step is done; good until a few more steps were launched."""


class Runner:
    """The model, its cache and its table of rows, for one capacity."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend | None,
        capacity: Capacity,
        layout: CacheLayout,
        *,
        use_graphs: bool,
        page_size: int,
        draft: CausalLM | None = None,
        host_places: int = 0,
        fp8_cache: bool = False,
    ) -> None:
        """`backend` computes prompts that need nothing from the cache; None leaves them to the op that reads it.

        `draft` guesses tokens; None looks them up in what the row has said before. `host_places`: pages of which the
        host has room for a copy. `fp8_cache`: keys and values are kept in fp8; those that a backend is given with its
        prompt are not rounded so.
        """
        weight, specs = model.lm_head.weight, model.model.attention_specs
        self.model, self.backend, self.capacity, self.page_size = model, backend, capacity, page_size
        self.device = weight.device
        self.cache = PagedCache(
            layout=layout,
            devices=model.model.layer_devices,
            num_pages=capacity.pages,
            num_kv_heads=specs[0].num_kv_heads,
            head_dim=specs[0].head_dim,
            page_size=page_size,
            dtype=FP8 if fp8_cache else weight.dtype,
        )
        self.host = HostCache(self.cache, host_places) if host_places else None
        self.table = idle_rows(capacity, len(layout.windows), page_size, self.device)
        model.model.rotary.reserve(capacity.length, self.device)
        pool = {"num_pages": capacity.pages, "page_size": page_size, "length": capacity.length}
        self.draft = None if draft is None else DraftModel(draft, layout, fp8_cache=fp8_cache, **pool)
        self._capture_backend = backend is None or backend.can_capture(model.attention_problem)
        self._boxes: dict[int, Postbox] = {}
        self._plans: dict[StepSize, Tensor] = {}
        self._graphs: dict[tuple[StepSize, Mode, bool], graphs.CapturedGraph[Output]] = {}
        self._met: set[tuple[StepSize, Mode, bool]] = set()
        self._pool = graphs.new_pool() if use_graphs else None
        self.captures = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pools."""
        return self.cache.nbytes + (0 if self.draft is None else self.draft.cache.nbytes)

    def step(
        self, chunks: Sequence[Stretch], rows: int, mode: Mode, targets: PromptTargets | None = None
    ) -> Output:
        """One step of the chunks, and of the first `rows` rows of the table; with prompt targets, without a graph.

        The first step of a size and mode runs without a graph, which compiles what needs compiling; the second is
        captured. Rows beyond those asked for are idle.
        """
        return self._sent(self._run(chunks, rows, mode, targets))

    def _run(self, chunks: Sequence[Stretch], rows: int, mode: Mode, targets: PromptTargets | None) -> Output:
        exact = StepSize.exact(chunks, rows)
        fresh = self.backend is not None and bool(chunks) and all(c.start == 0 for c in chunks)
        captures = self._pool and (self._capture_backend or not fresh) and targets is None
        size = exact.rounded(self.capacity.rows) if captures else None
        if size is None:
            plan = streams.upload(pack(chunks, exact), torch.int32, self.device) if chunks else None
            return self._step(exact, plan, mode, tuple(c.count for c in chunks) if fresh else None, targets)
        if chunks:
            self._upload(pack(chunks, size), size)
        return self._replayed(size, mode, fresh)

    def _upload(self, packed: Tensor, size: StepSize) -> None:
        """Puts a plan where the graphs of this size read it."""
        if size not in self._plans:
            self._plans[size] = torch.empty_like(packed, device=self.device)
        self._plans[size].copy_(packed.pin_memory(), non_blocking=True)

    def _replayed(self, size: StepSize, mode: Mode, fresh: bool) -> Output:
        key, plan, lengths = (size, mode, fresh), self._plans.get(size), () if fresh else None
        captured = self._graphs.get(key)
        if captured is None:
            first = key not in self._met
            self._met.add(key)
            result = self._step(size, plan, mode, lengths) if first else None
            if result is not None and size.tokens:  # prompts of a size may come but once
                return result
            captured = self._graphs[key] = graphs.capture(
                lambda: self._step(size, plan, mode, lengths), self._pool, device=self.device, warm_ups=0
            )
            self.captures += 1
            if result is not None:
                return result
        captured.replay()
        return captured.result

    def _step(
        self,
        size: StepSize,
        packed: Tensor | None,
        mode: Mode,
        fresh: tuple[int, ...] | None,
        targets: PromptTargets | None = None,
    ) -> Output:
        """`fresh` are the lengths of chunks that a backend is to compute, empty where only the device may know them."""
        state = self.table.decode
        if packed is None and mode.drafts is not None:
            return self._step_drafts(size.rows, mode, mode.drafts)
        if packed is None:
            own = state.rows(0, size.rows)
            view = CacheView(self.cache, own.block_tables, own.slots)
            plans = attention_plans(self.model, own.lengths)
            step = Step(
                phase="cached", positions=own.positions, lengths=own.lengths, reached=own.lengths, cache=view,
                plans=plans,
            )  # fmt: skip
            output = Output(0, None, self.model.logits(self._hidden(own.tokens, step)))
        else:
            plan = ChunkPlan.unpack(packed)
            read = self.model.ops.prepare(plan, state, size.tokens, size.rows)
            lengths = state.lengths[: size.rows]
            step = Step(
                phase="cached",
                positions=read.positions,
                lengths=lengths,
                plans=attention_plans(self.model, lengths),
                reached=read.reached,
                cache=CacheView(self.cache, state.block_tables, read.slots),
                chunks=Chunks(size.tokens, plan.bounds, plan.rows, read.lengths, fresh is not None),
                **({} if fresh is None else self._alone(plan, size, fresh)),
            )
            hidden = self._hidden(read.tokens, step)
            scored = None if targets is None else score_prompts(self.model, hidden, targets)
            logits = self.model.logits(hidden[read.last.long()])
            output = Output(size.chunks, read.rows, logits, prompt_logprobs=scored)
        return self._finish(output, mode, None) if mode.sample else output

    def _step_drafts(self, rows: int, mode: Mode, drafts: Drafts) -> Output:
        """A step of `rows` rows, each of which may take several tokens."""
        ops, state = self.model.ops, self.table.decode.rows(0, rows)
        if self.draft is None:
            guessed = ops.draft_lookup(state, drafts.count, drafts.longest)
        else:
            guessed = self.draft.guess(state, drafts.count)
        read, width = ops.spread_drafts(state, guessed), drafts.count + 1
        step = Step(
            phase="cached",
            positions=read.positions,
            lengths=read.lengths,
            reached=read.lengths,
            cache=CacheView(self.cache, read.block_tables, read.slots),
            plans=attention_plans(self.model, read.lengths),
            newest=width,
        )
        logits = self.model.logits(self.model.model(read.tokens, step))
        if mode.greedy:
            sampled = ops.argmax(logits)
        else:
            ways = (x.repeat_interleave(width) for x in self.table.sampling.rows(0, rows))
            sampled = ops.sample(logits, *ways, read.positions.long())
        return self._posted(Output(0, None, logits, ops.accept(sampled.view(rows, width), guessed, state)))

    def _hidden(self, tokens: Tensor, step: Step) -> Tensor:
        """The hidden states of a step that no draft model has guessed for; it sees the tokens too."""
        if self.draft is not None:
            self.draft.follow(tokens, step)
        return self.model.model(tokens, step)

    def _alone(self, plan: ChunkPlan, size: StepSize, lengths: tuple[int, ...]) -> dict:
        """What a backend reads of chunks that bring their keys along; what is left over is one filler sequence."""
        bounds = plan.bounds if lengths else torch.cat((plan.bounds, torch.full_like(plan.bounds[:1], size.tokens)))
        known = {"query_lengths": lengths, "longest": max(lengths)} if lengths else {"longest": size.tokens}
        return {"backend": self.backend, "cu_seqlens": bounds, **known}

    def finish(self, output: Output, mode: Mode, scores: Tensor | None = None) -> Output:
        """Draws the next token of each row and takes it into the table.

        Args:
            output: of a step that ended with the logits.
            mode: how to draw, and what to report.
            scores: [R, V], to draw from; None means the logits.
        """
        return self._sent(self._finish(output, mode, scores))

    def _finish(self, output: Output, mode: Mode, scores: Tensor | None) -> Output:
        ops, rows, logits = self.model.ops, output.rows, output.logits
        sampled = self._drawn(logits if scores is None else scores, rows, mode)
        logprobs = None
        if mode.logprobs is not None:
            chosen = sampled if rows is None else sampled.masked_fill(rows < 0, -1)
            logprobs = ops.logprobs(logits, chosen, min(mode.logprobs, logits.shape[1]))
        state = self.table.decode
        ops.advance(sampled, state if rows is not None else state.rows(0, logits.shape[0]), rows)
        return self._posted(output._replace(tokens=sampled, logprobs=logprobs))

    def _posted(self, output: Output) -> Output:
        """Ends a step, captured or not, with its tokens on their way to the host."""
        assert output.tokens is not None, "a step that has sampled"
        self._box(output.tokens).post(self.model.ops, output.tokens)
        return output

    def _sent(self, output: Output) -> Output:
        """The output of a step that has been launched, with the place of its tokens."""
        if output.tokens is None:
            return output
        return output._replace(posted=self._box(output.tokens).take(output.tokens.shape))

    def _box(self, tokens: Tensor) -> Postbox:
        width = power_of_two(tokens.numel())
        if width not in self._boxes:
            self._boxes[width] = Postbox(width, tokens.device)
        return self._boxes[width]

    def reset(self) -> None:
        """Idles all rows after an error."""
        state = self.table.decode
        state.lengths.zero_()
        state.slots.fill_(-1)
        for box in self._boxes.values():
            box.start_again()

    def _drawn(self, scores: Tensor, rows: Tensor | None, mode: Mode) -> Tensor:
        """[R] int64."""
        ops, state, sampling = self.model.ops, self.table.decode, self.table.sampling
        if mode.greedy:
            return ops.argmax(scores)
        if rows is None:
            count = scores.shape[0]
            return ops.sample(scores, *sampling.rows(0, count), state.positions[:count].long())
        index = rows.clamp(min=0).long()
        return ops.sample(scores, *sampling.picked(index), state.positions[index].long())
