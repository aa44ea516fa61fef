"""PyTorch's FlexAttention over a flat stream: windows, softcap, sinks and value heads of any size, with gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuformers.cuda.device import capability
from cuformers.kernels.recompute import recomputed
from cuformers.nn.attention.backend import AttentionProblem, AttentionSpec, lacks
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.step import Step

BLOCK = 128
"""Queries, and keys, of a block of the mask."""


class _Masks(NamedTuple):
    """The masks of one step, by window; all its layers share them."""

    bounds: Tensor
    by_window: dict[int | None, Any]


class FlexAttention:
    """attn_implementation="flex_attention". On a GPU it is compiled, once for all lengths; on the CPU it is not."""

    name = "flex_attention"

    def __init__(self) -> None:
        self._last: _Masks | None = None

    def why_not(self, problem: AttentionProblem) -> str | None:
        on = capability(problem.device)
        if on is None and problem.train:
            return "has no backward pass on the CPU"
        if on is not None and on < (8, 0):
            return "needs compute capability 8.0 or newer"
        if on is not None and problem.head_dim < 16:
            return f"takes a head_dim from 16 on, not {problem.head_dim}"
        return lacks(problem, "window", "softcap", "sinks", "value heads of another size")

    def can_capture(self, problem: AttentionProblem) -> bool:
        return False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        if not q.numel():
            return q.new_empty(q.shape[0], spec.num_heads, v.shape[-1])
        if q.device.type == "cpu" and torch.is_grad_enabled():
            return self._with_gradients(q, k, v, spec, step, sinks)
        return self._values(q, k, v, spec, step, sinks)

    def _with_gradients(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None
    ) -> Tensor:
        """On the CPU the gradients are eager's, computed anew."""
        given = (sinks,) if sinks is not None else ()
        return recomputed(
            lambda q, k, v, *sinks: self._values(q, k, v, spec, step, *sinks),
            lambda q, k, v, *sinks: EagerAttention().forward(q, k, v, spec, step, *sinks),
            *(q, k, v, *given),
        )

    def _values(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        options: dict[str, Any] = {"scale": spec.scale, "enable_gqa": spec.num_heads != spec.num_kv_heads}
        if spec.softcap is not None:
            options["score_mod"] = _capped(spec.softcap)
        options["block_mask"] = self._mask(step, spec.window)
        if q.device.type == "cpu":
            attend = _plain()
            q, k, v = q.detach(), k.detach(), v.detach()  # it refuses inputs that might ask for gradients
        else:
            kind = replace(spec, layer=0, window=None, rope=None)
            attend = _compiled(kind, torch.is_grad_enabled())
            options["kernel_options"] = {"BACKEND": "TRITON"}  # one kernel for short and long streams
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        if sinks is None:
            return attend(*heads_first, **options)[0].transpose(0, 1)
        out, sums = attend(*heads_first, return_aux=_lse(), **options)
        share = torch.sigmoid(sums.lse - sinks.float()[:, None])  # what the sink leaves to the keys
        return (out * share[..., None].to(out.dtype))[0].transpose(0, 1)

    def _mask(self, step: Step, window: int | None) -> Any:
        bounds = step.cu_seqlens
        assert bounds is not None and step.query_lengths is not None, "flex attention needs the lengths on the host"
        if self._last is None or self._last.bounds is not bounds:
            self._last = _Masks(bounds, {})
        masks = self._last.by_window
        if window not in masks:
            masks[window] = block_mask(bounds, sum(step.query_lengths), window)
        return masks[window]


def block_mask(bounds: Tensor, length: int, window: int | None) -> Any:
    """Which blocks of keys each block of queries sees, and which of them wholly, from where the sequences begin.

    It takes memory for (length / 128)^2 numbers: nothing is asked of each pair of tokens.

    Args:
        bounds: [N + 1], ascending from 0 to length.
        length: tokens of the stream.
        window: keys that a query sees, its own included; None means all before it.

    Returns:
        A torch BlockMask for [1, 1, length, length].
    """
    from torch.nn.attention.flex_attention import BlockMask

    tokens = torch.arange(length, device=bounds.device)
    begins = bounds[torch.bucketize(tokens, bounds[1:], right=True)].long()  # of each token's own sequence
    lowest = begins if window is None else torch.maximum(begins, tokens - window + 1)  # first key that it sees
    starts = torch.arange(0, length, BLOCK, device=bounds.device)
    last = (starts + BLOCK - 1).clamp(max=length - 1)
    blocks = torch.arange(len(starts), device=bounds.device)
    own = blocks[:, None]
    seen = (blocks <= own) & (blocks >= lowest[starts][:, None] // BLOCK)
    whole = (blocks < own) & (starts >= lowest[last][:, None])
    partial, full = _rows(seen & ~whole), _rows(whole)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= lowest[query])

    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length))


def _rows(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[Q, K] bool -> how many are chosen of each row [1, 1, Q], and which, these first [1, 1, Q, K]; int32."""
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1)[None, None].int(), order[None, None].int()


def _capped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def _lse() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def _plain() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled(spec: AttentionSpec, grad: bool) -> Callable[..., Any]:
    """FlexAttention compiled for one kind of layer, with or without gradients, and all lengths.

    PyTorch compiles a function a limited number of times, counted by its code, and for another kind of layer anew: so
    each kind has a copy. At the limit it raises, rather than go on uncompiled with all scores in memory.
    """
    del grad  # tells the copies apart

    def attend(*args: Any, **kwargs: Any) -> Any:
        return _plain()(*args, **kwargs)

    own = FunctionType(attend.__code__.replace(), attend.__globals__, f"flex_attention_{spec.head_dim}")
    # With dynamic lengths a softcap would be an input of the kernel too, a number on the host, which it does not take.
    constant = torch._dynamo.config.patch(specialize_float=True)  # pyright: ignore[reportAttributeAccessIssue]
    return constant(torch.compile(own, dynamic=True, fullgraph=True))
