"""Launches of the grouped products."""

from typing import Any

import torch
import triton
from torch import Tensor

from cuformers.cuda.device import capability
from cuformers.kernels.experts.config import GroupedConfig
from cuformers.kernels.experts.config import gradient as gradient_config
from cuformers.kernels.experts.config import grouped as grouped_config
from cuformers.kernels.experts.gradient_kernel import row_sum_kernel, weight_gradient_kernel
from cuformers.kernels.experts.grouped_kernel import combine_kernel, grouped_kernel
from cuformers.kernels.experts.order import Order
from cuformers.kernels.launch import interpreted, pdl

COMBINE_BLOCK = 512
"""Columns per program of `combine_kernel`."""
SUM_ROWS, SUM_BLOCK = 32, 128
"""Rows that a program of `row_sum_kernel` adds at once, and its columns."""


def grouped(
    x: Tensor,
    weight: Tensor,
    order: Order,
    block_m: int,
    *,
    top_k: int = 0,
    transposed: bool = False,
    activation: str = "none",
    interleaved: bool = False,
    bias: Tensor | None = None,
    cut: GroupedConfig | None = None,
) -> Tensor:
    """Each sorted row by its expert's weight [E, N, K]: y [P, N].

    Args:
        x: [P, K], sorted; or [T, K] with `top_k` above 0.
        block_m: that `order` was made for.
        top_k: choices of a token.
        transposed: the weight is [E, K, N].
        activation: other than "none", the weight has 2N outputs, the gate's first, and y is act(gate) * up.
        interleaved: with an activation, gate and up take turns.
        bias: [E, outputs of the weight].
        cut: overrides the rule, for tuning.
    """
    gated, (_, K) = activation != "none", x.shape
    N = weight.shape[2 if transposed else 1] // (2 if gated else 1)
    cut = cut or grouped_config(block_m, gated=gated, dtype=x.dtype, on=capability(x.device))
    assert cut.block_m == block_m, "the tiles have block_m rows"
    y = torch.empty(len(order.order), N, dtype=x.dtype, device=x.device)
    flags: dict[str, Any] = {"N": N, "K": K, "TOP_K": top_k, "TRANSPOSED": transposed, "ACTIVATION": activation}
    flags |= {"INTERLEAVED": interleaved, "BIAS": bias is not None}
    operands = (x, weight, y if bias is None else bias, order.order, order.tiles, y)
    grid = (len(order.tiles) * triton.cdiv(N, cut.block_n),)
    grouped_kernel[grid](*operands, **flags, **_options(cut), **pdl(x.device))
    return y


def combine(
    y: Tensor, order: Order, top_k: int, weights: Tensor | None, residual: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """residual + scale * the sum of each token's rows of y [P, H], weighted by weights [T, top_k]: [T, H]."""
    P, H = y.shape
    out = torch.empty(P // top_k, H, dtype=y.dtype, device=y.device)
    flags: dict[str, Any] = {"WEIGHTED": weights is not None, "RESIDUAL": residual is not None}
    flags |= {"TOP_K": top_k, "BLOCK": COMBINE_BLOCK, **pdl(y.device)}
    given = (y if weights is None else weights, y if residual is None else residual)
    grid = (P // top_k, triton.cdiv(H, COMBINE_BLOCK))
    combine_kernel[grid](y, order.places, *given, out, float(scale), H, **flags)
    return out


def weight_gradient(
    a: Tensor, b: Tensor, order: Order, *, top_k_a: int = 0, top_k_b: int = 0, cut: GroupedConfig | None = None
) -> Tensor:
    """For each expert the sum over its rows of a's row [M] times b's row [N]: [E, M, N].

    a and b are sorted, [P, M] and [P, N], or by token where their top_k is above 0.
    """
    cut = cut or gradient_config(a.dtype, capability(a.device))
    E, M, N = len(order.bounds) - 1, a.shape[1], b.shape[1]
    out = torch.empty(E, M, N, dtype=a.dtype, device=a.device)
    flags: dict[str, Any] = {"M": M, "N": N, "TOP_K_A": top_k_a, "TOP_K_B": top_k_b, **_options(cut)}
    grid = (E * triton.cdiv(M, cut.block_m) * triton.cdiv(N, cut.block_n),)
    weight_gradient_kernel[grid](a, b, order.order, order.bounds, out, **flags)
    return out


def row_sums(a: Tensor, order: Order, *, top_k: int = 0, weights: Tensor | None = None) -> Tensor:
    """For each expert the sum over its rows of a's row [N], times the pair's weight where given: [E, N].

    a is sorted, [P, N], or by token where top_k is above 0; weights [T, k].
    """
    E, N = len(order.bounds) - 1, a.shape[1]
    out = torch.empty(E, N, dtype=a.dtype, device=a.device)
    flags: dict[str, Any] = {"TOP_K": top_k, "WEIGHTED": weights is not None, "ROWS": SUM_ROWS, "BLOCK": SUM_BLOCK}
    given = a if weights is None else weights
    row_sum_kernel[E, triton.cdiv(N, SUM_BLOCK)](a, given, order.order, order.bounds, out, N, **flags)
    return out


def _options(cut: GroupedConfig) -> dict[str, Any]:
    blocks = {"BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k, "STAGES": cut.stages}
    return {**blocks, "UPCAST": interpreted(), "num_warps": cut.num_warps}
