"""A small model that guesses the next tokens of each row for a large one to check (arXiv 2211.17192).

It has a pool of its own, and finds its keys by the block tables of the large model's rows: what one page holds of the
one, it holds of the other. What it guesses changes no answer, so that its keys need no care beyond that.
"""

from dataclasses import replace

import torch
from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.engine.attention_plans import attention_plans
from cuformers.kernels.advance import DecodeState
from cuformers.kernels.cache_scales import FP8
from cuformers.nn.cache import CacheLayout, PagedCache, layout
from cuformers.nn.decoder import CausalLM
from cuformers.nn.step import CacheView, Step


def check_draft(draft: CausalLM, model: CausalLM) -> None:
    """Raises ValueError where one model can't guess for another."""
    ours, theirs = (m.lm_head.weight for m in (model, draft))
    if theirs.shape[0] > ours.shape[0]:
        allowed = f"a model whose vocabulary is within the other's, of {ours.shape[0]} tokens"
        raise bad_argument("assistant_model", f"one of {theirs.shape[0]} tokens", allowed)
    if ours.device != theirs.device:
        raise bad_argument("assistant_model", f"one on {theirs.device}", f"one on {ours.device}, beside the other")
    if all(spec.window is not None for spec in model.model.attention_specs):
        remedy = "Use prompt_lookup_num_tokens."
        raise bad_argument("assistant_model", "any", "none for a model all of whose layers have windows", remedy)


def page_bytes(draft: CausalLM, page_size: int, fp8_cache: bool) -> int:
    """Bytes of one page of the draft's pool."""
    specs, dtype = draft.model.attention_specs, FP8 if fp8_cache else draft.lm_head.weight.dtype
    return PagedCache.page_bytes(len(specs), specs[0].num_kv_heads, specs[0].head_dim, page_size, dtype)


class DraftModel:
    """The small model, with the keys of every row that the large one has."""

    def __init__(
        self,
        model: CausalLM,
        large: CacheLayout,
        *,
        num_pages: int,
        page_size: int,
        length: int,
        fp8_cache: bool,
    ) -> None:
        """
        Args:
            model: guesses.
            large: groups of the large model's layers; one that sees everything gives the block tables.
            num_pages: pages of the large model's pool.
            page_size: tokens of a page.
            length: tokens of a row at the most.
            fp8_cache: keep keys and values in fp8.
        """
        specs = model.model.attention_specs
        self.model, self._group = model, large.windows.index(None)
        self.cache = PagedCache(
            layout=layout([spec.window for spec in specs], apart=False),
            devices=model.model.layer_devices,
            num_pages=num_pages,
            num_kv_heads=specs[0].num_kv_heads,
            head_dim=specs[0].head_dim,
            page_size=page_size,
            dtype=FP8 if fp8_cache else model.lm_head.weight.dtype,
        )
        model.model.rotary.reserve(length + 1, model.lm_head.weight.device)

    def follow(self, tokens: Tensor, step: Step) -> None:
        """Computes the keys of the tokens [T] of a step of the large model."""
        assert step.cache is not None, "the large model's step has a cache"
        chunks = step.chunks._replace(fresh=False) if step.chunks is not None else None
        cache = self._view(step.cache.block_tables, step.cache.slots)
        self.model.model(
            tokens, replace(step, cache=cache, chunks=chunks, plans=attention_plans(self.model, step.lengths))
        )

    def guess(self, state: DecodeState, count: int) -> Tensor:
        """The next tokens of each row, [B, count] int64, the likeliest one after the other; any for idle rows."""
        ops, guesses = self.model.ops, []
        nothing = state.tokens.new_empty(state.tokens.shape[0], 0)
        for ahead in range(count + 1):
            # The keys of the last guess are needed too, should all of them be right.
            read = ops.spread_drafts(state._replace(positions=state.positions + ahead), nothing)
            step = Step(
                phase="cached",
                positions=read.positions,
                lengths=read.lengths,
                reached=read.lengths,
                cache=self._view(read.block_tables, read.slots),
                plans=attention_plans(self.model, read.lengths),
            )
            hidden = self.model.model(read.tokens, step)
            if ahead < count:
                guesses.append(ops.argmax(self.model.logits(hidden)))
                state = state._replace(tokens=guesses[-1])
        return torch.stack(guesses, dim=1)

    def _view(self, block_tables: Tensor, slots: Tensor) -> CacheView:
        """The tables and slots [G, ...] of the large model's groups, for the one group of this one."""
        group = slice(self._group, self._group + 1)
        return CacheView(self.cache, block_tables[group], slots[group])
