"""`rope_cache`, cut in one way for all numbers of tokens, with and without a cache."""

from typing import Any

import torch
from torch import Tensor

from cuformers.kernels.norm_args import Norm
from cuformers.kernels.recompute import recomputed
from cuformers.kernels.rope_cache import reference, triton

PER_PROGRAM = triton.MANY_HEADS
"""Heads of a program: it fixes the order in which the squares of a head's norm are added."""
PAGE = 64


def rope_cache(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rows: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the op's package. Gradients flow to qkv and to the norms' weights."""
    tables = (cos, sin, rows)
    heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    if k_cache is None or v_cache is None or slots is None:
        # The kernel with a cache serves calls without one too: compiled without, it might add in another order.
        k_cache = v_cache = qkv.new_empty(1, num_kv_heads, PAGE, head_dim)
        slots = torch.full_like(rows, -1)
    cached = {"k_cache": k_cache, "v_cache": v_cache, "slots": slots, "per_program": PER_PROGRAM}
    if not torch.is_grad_enabled():
        return triton.rope_cache(qkv, *tables, q_norm=q_norm, k_norm=k_norm, **heads, **cached)
    norms = {name: norm for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)) if norm is not None}

    def with_weights(weights: tuple[Tensor, ...]) -> dict[str, Norm]:
        return {name: norm._replace(weight=w) for (name, norm), w in zip(norms.items(), weights, strict=True)}

    def values(qkv: Tensor, *weights: Tensor) -> Tensor:
        # The kernel overwrites its input, which the backward pass still needs.
        return _joined(triton.rope_cache(qkv.clone(), *tables, **with_weights(weights), **heads, **cached))

    def formula(qkv: Tensor, *weights: Tensor) -> Tensor:
        return _joined(reference.rope_cache(qkv, *tables, **with_weights(weights), **heads))

    joined = recomputed(values, formula, qkv, *(norm.weight for norm in norms.values()))
    q, k, v = joined.unflatten(-1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


def _joined(qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return torch.cat(qkv, dim=1).flatten(1)
