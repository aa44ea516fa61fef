"""Routing and experts, cut in one way for all numbers of tokens: a row's tile never changes its size.

What shares the tile, and where in it the row stands, does not matter; its k results are added in the order of its ids.
"""

import torch
from torch import Tensor

from cuformers.kernels.experts import Biases, reference, triton
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
    biases: Biases | None = None,
    interleaved: bool = False,
) -> Tensor:
    """See the op's package."""
    block_m = ROWS if x.dtype.itemsize == 2 else WIDE_ROWS

    if not len(x):
        return x if residual is None else x + residual

    count, chosen = 0 if biases is None else len(biases), ids.contiguous()

    def values(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        x, gate_up, down, weights = (t.detach().contiguous() for t in (x, gate_up, down, weights))
        more = [t.detach().contiguous() for t in rest]
        given = Biases(*more[:count]) if count else None
        kept = more[count] if len(more) > count else None
        operands = (x, gate_up, down, weights, chosen, activation, kept, scale, block_m)
        return triton.sorted_experts(*operands, biases=given, interleaved=interleaved)

    def formula(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        given = Biases(*rest[:count]) if count else None
        kept = rest[count] if len(rest) > count else None
        options = {"scale": scale, "biases": given, "interleaved": interleaved}
        return reference.experts(x, gate_up, down, weights, ids, activation, residual=kept, **options)

    given = (x, gate_up, down, weights, *(biases or ()), *(() if residual is None else (residual,)))
    return recomputed(values, formula, *given) if torch.is_grad_enabled() else values(*given)
