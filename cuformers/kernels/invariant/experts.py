"""Routing and experts, cut in one way for all numbers of tokens: a row's tile never changes its size.

What shares the tile, and where in it the row stands, does not matter; its k results are added in the order of its ids.
"""

import torch
from torch import Tensor

from cuformers.kernels.experts import reference, triton
from cuformers.kernels.moe_route import Routes
from cuformers.kernels.moe_route import reference as route_reference
from cuformers.kernels.moe_route import triton as route_triton
from cuformers.kernels.recompute import recomputed, with_gradient

ROWS, WIDE_ROWS = 64, 32
"""Rows of a tile of 2-byte elements, and of float32."""

_route = with_gradient(route_triton.moe_route, route_reference.moe_route)


def moe_route(logits: Tensor, top_k: int, *, normalise: bool) -> Routes:
    """See the op's package."""
    return Routes(*_route(logits, top_k, normalise=normalise))


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str,
    *,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """See the op's package."""
    block_m = ROWS if x.dtype.itemsize == 2 else WIDE_ROWS

    if not len(x):
        return x if residual is None else x + residual

    def values(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        x, gate_up, down, weights = (t.detach().contiguous() for t in (x, gate_up, down, weights))
        kept = rest[0].detach().contiguous() if rest else None
        chosen = ids.contiguous()
        return triton.sorted_experts(x, gate_up, down, weights, chosen, activation, kept, scale, block_m)

    def formula(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        kept = rest[0] if rest else None
        return reference.experts(x, gate_up, down, weights, ids, activation, residual=kept, scale=scale)

    given = (x, gate_up, down, weights, *(() if residual is None else (residual,)))
    return recomputed(values, formula, *given) if torch.is_grad_enabled() else values(*given)
