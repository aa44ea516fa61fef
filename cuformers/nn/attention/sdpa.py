"""PyTorch's scaled_dot_product_attention and, on a GPU, its variable-length form: the default backend."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuformers.cuda.device import capability
from cuformers.nn.attention.backend import BOTH_WAYS, AttentionProblem, AttentionSpec, lacks
from cuformers.nn.attention.rectangles import Rectangle, rectangles
from cuformers.nn.attention.sdpa_rule import SdpaKernel, SdpaProblem, choose_kernel, takes_varlen
from cuformers.nn.attention.varlen import torch_varlen
from cuformers.nn.step import Step

QUERIES_AT_ONCE = 2048
"""Queries of a windowed sequence that share a mask: it holds so many rows of the keys that they see, not n x n."""
PRIORITY: dict[SdpaKernel, list[SDPBackend]] = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}
"""First the kernel that was chosen, then what serves where PyTorch finds that it does not take a shape."""


class SdpaAttention:
    """Rectangles go to scaled_dot_product_attention; on a GPU, ragged or windowed streams to varlen_attn.

    varlen_attn is FlashAttention-2 inside: it takes grouped heads and windows, and copies nothing.
    """

    name = "sdpa"

    def why_not(self, problem: AttentionProblem) -> str | None:
        return lacks(problem, "window", BOTH_WAYS)

    def can_capture(self, problem: AttentionProblem) -> bool:
        return takes_varlen(capability(problem.device), problem.dtype, problem.head_dim)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        if not q.numel():
            return q.new_empty(*q.shape[:2], v.shape[-1])
        assert sinks is None, "refused by why_not"
        size = step.uniform
        kernel = _kernel(q, spec, step, size)
        if kernel == "varlen":
            return torch_varlen(q, k, v, spec, step)
        if size is not None:
            q, k, v = (x.unflatten(0, (-1, size)) for x in (q, k, v))
            return _dense(q, k, v, spec, kernel).flatten(0, 1)
        assert step.query_lengths is not None, "lengths that only the device knows are for varlen_attn"
        if kernel == "efficient":  # on a GPU: few calls
            return _grouped(q, k, v, spec, rectangles(step.query_lengths, q.device), kernel)
        parts = zip(*(x.split(step.query_lengths) for x in (q, k, v)))
        return torch.cat([_dense(q[None], k[None], v[None], spec, kernel)[0] for q, k, v in parts])


def _grouped(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, groups: Sequence[Rectangle], kernel: SdpaKernel
) -> Tensor:
    """q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d]; sequences of like length in one call."""
    outs = []
    for group in groups:
        mask = group.mask(spec) if group.real.shape[0] > 1 else None  # one sequence is never padded
        out = _dense(group.filled(q), group.filled(k), group.filled(v), spec, kernel, mask)
        outs.append(out.flatten(0, 1)[group.cells])
    return torch.cat(outs)[torch.cat([group.tokens for group in groups]).argsort()]


def _kernel(q: Tensor, spec: AttentionSpec, step: Step, size: int | None) -> SdpaKernel:
    windowed = spec.window is not None and spec.window < step.longest
    return choose_kernel(SdpaProblem(capability(q.device), q.dtype, spec.head_dim, size, windowed)).kernel


def _dense(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kernel: SdpaKernel, mask: Tensor | None = None
) -> Tensor:
    """q [N, S, heads, d], k and v [N, S, kv_heads, d] -> [N, S, heads, d]; a mask [N, 1, S, S] has the window too."""
    length = q.shape[1]
    if kernel == "efficient":  # with grouped heads PyTorch would write out the scores
        k, v = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(PRIORITY[kernel], set_priority=True) if kernel in PRIORITY else nullcontext():
        if mask is None and spec.window is not None and spec.window < length:
            return _windowed(q, k, v, spec, spec.window).transpose(1, 2)
        return _attend(q, k, v, mask, spec).transpose(1, 2)


def _windowed(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, window: int) -> Tensor:
    """Some queries after the others, each with the keys that they see."""
    outs, length = [], q.shape[2]
    for begin in range(0, length, QUERIES_AT_ONCE):
        end, first = min(begin + QUERIES_AT_ONCE, length), max(0, begin - window + 1)
        ahead = 1 if spec.causal else window
        last = min(length, end - 1 + ahead)
        own = torch.arange(begin, end, device=q.device)[:, None]
        keys = torch.arange(first, last, device=q.device)
        mask = (keys < own + ahead) & (keys > own - window)
        outs.append(_attend(q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], mask, spec))
    return torch.cat(outs, dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    causal, grouped = spec.causal and mask is None and q.shape[2] > 1, q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=grouped
    )
