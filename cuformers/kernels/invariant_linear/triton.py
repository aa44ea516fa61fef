"""The invariant products: how they are launched, and the ops made of them."""

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from cuformers.cuda.device import capability
from cuformers.kernels.activation import activation_function
from cuformers.kernels.gated_linear.reference import gated_activation
from cuformers.kernels.gated_linear.triton import BLOCK as GATE_BLOCK
from cuformers.kernels.gated_linear.triton import _gate_kernel
from cuformers.kernels.invariant_linear.config import (
    BLOCK_K,
    GATED_WIDE_DTYPE_TILE,
    PARTIAL_ROWS,
    WIDE_DTYPE_TILE,
    Cut,
    chunk,
    config,
    splits,
)
from cuformers.kernels.invariant_linear.gradient import linear_map
from cuformers.kernels.invariant_linear.kernel import product_kernel, sum_kernel
from cuformers.kernels.launch import interpreted, pdl, sms
from cuformers.kernels.norm import reference as norm_reference
from cuformers.kernels.norm.triton import rms_norm
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.recompute import recomputed, with_gradient

GROUP = 8
"""Tiles of rows that share a pass over the weight."""
SUM_BLOCK = 1024
"""Outputs per program of `sum_kernel`."""
AHEAD = 512
"""Columns of the weight that are asked for before the kernel before has finished, where rows are few."""
FEW_ROWS = 64
BLACKWELL = 10
"""Major capability whose larger tiles have tensor cores of their own: small tiles might round otherwise."""
SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
"""Shared memory that a program may have, KiB, by compute capability; 99 on the others."""


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    scale: float = 1.0,
    activation: str = "none",
    cut: Cut | None = None,
) -> Tensor:
    """act(gate) * up, or (x @ weight.T + bias) * scale + residual: [T, K] -> [T, N]; `cut` never changes bits."""
    gated = activation != "none"
    T, K = x.shape
    N = weight.shape[0] // 2 if gated else weight.shape[0]
    assert weight.shape[1] == K and weight.dtype == x.dtype, "the weight has x's columns and dtype"
    x, weight = _aligned(x), weight.detach().contiguous()
    y = torch.empty(T, N, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if residual is not None:
        assert residual.shape == y.shape and residual.dtype == x.dtype, "the residual has the result's shape and dtype"
        residual = residual.detach().contiguous()
    bias = None if bias is None else bias.detach()
    count = 1 if gated else splits(N, K)
    if x.dtype == torch.float32:
        cut = Cut(GATED_WIDE_DTYPE_TILE if gated else WIDE_DTYPE_TILE)
    major = (capability(x.device) or (9, 0))[0]
    cut = cut or config(N, K, T, count=count, gated=gated, num_sms=sms(x.device), small=major != BLACKWELL)
    if cut.then == "sum":
        for rows in (slice(i, i + PARTIAL_ROWS) for i in range(0, T, PARTIAL_ROWS)):
            r = None if residual is None else residual[rows]
            _sum_of_parts(x[rows], weight, bias, r, y[rows], scale, count, cut)
    elif cut.then == "gate":
        gate_up = torch.empty(T, 2 * N, dtype=x.dtype, device=x.device)
        _launch(x, weight, bias, None, gate_up, 2 * N, 1.0, 1, "none", cut)
        _gate(gate_up, y, activation)
    else:
        _launch(x, weight, bias, residual, y, N, scale, count, activation, cut)
    return y


def _aligned(x: Tensor) -> Tensor:
    """x, contiguous and from a multiple of 16 bytes on, as tensor descriptors ask."""
    x = x.detach().contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _sum_of_parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    scale: float,
    count: int,
    cut: Cut,
) -> None:
    T, N = y.shape
    parts = torch.empty(count, T, N, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, None, parts, N, 1.0, count, "none", cut)
    options = {"num_warps": 4, "enable_fp_fusion": False, **pdl(x.device)}
    sum_kernel[T, -(-N // SUM_BLOCK)](
        parts, parts if bias is None else bias, parts if residual is None else residual, y, T, N, float(scale),
        SPLITS=count, BLOCK=SUM_BLOCK, BIAS=bias is not None, RESIDUAL=residual is not None, **options,
    )  # fmt: skip


def _gate(gate_up: Tensor, y: Tensor, activation: str) -> None:
    T, I = y.shape
    options = {"num_warps": 4, "enable_fp_fusion": False, **pdl(y.device)}
    _gate_kernel[T, -(-I // GATE_BLOCK)](gate_up, y, I, BLOCK=GATE_BLOCK, ACTIVATION=activation, **options)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    N: int,
    scale: float,
    count: int,
    activation: str,
    cut: Cut,
) -> None:
    (T, K), tile = x.shape, cut.tile
    gated = activation != "none"
    block_k = BLOCK_K if x.element_size() == 2 else BLOCK_K // 2
    tma = _has_tma(x.device) and x.element_size() == 2 and K % 8 == 0 and weight.data_ptr() % 16 == 0
    second = tile.block_n2 if tile.block_n2 > 1 else tile.block_n
    x_in, w_in, w2_in = (
        TensorDescriptor.from_tensor(t, [block, block_k]) if tma else t
        for t, block in ((x, tile.block_m), (weight, tile.block_n), (weight, second))
    )
    partial = cut.then == "sum"
    units = -(-T // tile.block_m) * -(-N // (tile.block_n if gated else tile.width)) * (count if partial else 1)
    options = {
        "num_warps": tile.num_warps, "num_stages": _stages(tile.num_stages, (tile.block_m + tile.width) * block_k, x),
        "enable_fp_fusion": False, **pdl(x.device),
    }  # fmt: skip
    product_kernel[(units,)](
        x_in, w_in, w2_in, weight, x if bias is None else bias, x if residual is None else residual, y,
        T, N, K, chunk(K, count) if count > 1 else K, float(scale),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_N2=tile.block_n2, BLOCK_K=block_k, GROUP=GROUP,
        SPLITS=count, PARTIAL=partial, BIAS=bias is not None, RESIDUAL=residual is not None,
        ACTIVATION=activation, TMA=tma, UPCAST=interpreted(), AHEAD=AHEAD if T <= FEW_ROWS else 0, **options,
    )  # fmt: skip


def _has_tma(device: torch.device) -> bool:
    return interpreted() or (capability(device) or (0, 0)) >= (9, 0)


def _stages(wanted: int, elements: int, x: Tensor) -> int:
    """Stages of so many elements that fit the device's shared memory, with a KiB to spare for barriers."""
    room = SHARED.get(capability(x.device) or (9, 0), 99) * 1024 - 1024
    return max(1, min(wanted, room // (elements * x.element_size())))


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else with_gradient(rms_norm, norm_reference.rms_norm)(x, *norm)


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    overwrite: bool = False,
) -> Tensor:
    """See the package. Nothing is overwritten."""
    del overwrite
    return linear_map(product, _normed(x, norm), weight, bias, residual=residual, scale=scale)


def invariant_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, norm: Norm | None = None
) -> Tensor:
    """See the package."""
    activation_function(activation)  # refuses an unknown name
    x = _normed(x, norm)

    def values(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return product(x, weight, bias[0] if bias else None, activation=activation)

    def formula(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return gated_activation(F.linear(x, weight, bias[0] if bias else None), activation)

    return recomputed(values, formula, x, weight, *(() if bias is None else (bias,)))
