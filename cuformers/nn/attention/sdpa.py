"""PyTorch's scaled_dot_product_attention and, on a GPU, its variable-length form: the default backend."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cuformers.nn.attention.backend import BOTH_WAYS, AttentionProblem, AttentionSpec, lacks
from cuformers.nn.attention.eager import attention_mask
from cuformers.nn.attention.flash2 import torch_varlen, varlen_fits
from cuformers.nn.step import Step


def _dense(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """q [N, S, heads, d], k and v [N, S, kv_heads, d] -> [N, S, heads, d]."""
    length = q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    windowed = spec.window is not None and spec.window < length
    mask = attention_mask(length, spec, q.device) if windowed else None
    causal = spec.causal and mask is None and length > 1
    grouped = spec.num_heads != spec.num_kv_heads
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)


class SdpaAttention:
    """Rectangles go to scaled_dot_product_attention; on a GPU, ragged or windowed streams to varlen_attn.

    varlen_attn is FlashAttention-2 inside: it takes grouped heads and windows, and copies nothing.
    """

    name = "sdpa"

    def why_not(self, problem: AttentionProblem) -> str | None:
        return lacks(problem, "window", BOTH_WAYS)

    def can_capture(self, problem: AttentionProblem) -> bool:
        return varlen_fits(problem.device, problem.dtype, problem.head_dim)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "refused by why_not"
        size = step.uniform
        fits = varlen_fits(q.device, q.dtype, spec.head_dim)
        windowed = spec.window is not None and spec.window < step.longest
        if fits and (size is None or windowed):
            return torch_varlen(q, k, v, spec, step)
        if size is not None:
            q, k, v = (x.unflatten(0, (-1, size)) for x in (q, k, v))
            return _dense(q, k, v, spec).flatten(0, 1)
        assert step.query_lengths is not None, "lengths that only the device knows are for varlen_attn"
        parts = zip(*(x.split(step.query_lengths) for x in (q, k, v)))
        return torch.cat([_dense(q[None], k[None], v[None], spec)[0] for q, k, v in parts])
