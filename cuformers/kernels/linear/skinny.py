"""Launches of the products of few rows: by multiply and sum, on tensor cores from the third row on."""

from typing import Any

import torch
import triton
from torch import Tensor

from cuformers.kernels.launch import interpreted, pdl, sms
from cuformers.kernels.linear.config import MAX_ROWS, FmaConfig, MmaConfig, fma_config, mma_config
from cuformers.kernels.linear.fma_kernel import fma_kernel
from cuformers.kernels.linear.mma_kernel import BLOCK_K, BLOCK_N, mma_kernel
from cuformers.kernels.norm.triton import rms_norm
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.op import HALF

FMA_ROWS = 2
"""More rows go to tensor cores, where they are there for the dtype."""
FMA_ROWS_ALONE = 4
"""Most rows that are multiplied and summed where they are not."""
HEAVY_ROWS, HEAVY = 8, 64 * 2**20
"""Weights of so many bytes belong to cuBLAS from so many rows on: x is loaded anew for each 16 outputs."""
MAX_K = 16384
"""Above this a program's weights do not fit its registers."""
WIDE = 65536
"""From so many outputs on, which only heads have, cuBLAS is as fast or faster at 2 rows and more."""


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether these kernels serve the product of x [T, K] with weight [N, K]."""
    T, K = x.shape
    return 0 < T <= _most_rows(x, weight) and K <= MAX_K and weight.is_contiguous() and weight.dtype == x.dtype


def _most_rows(x: Tensor, weight: Tensor) -> int:
    if weight.shape[0] >= WIDE:
        return 1
    if not _has_mma(x):
        return FMA_ROWS_ALONE
    return MAX_ROWS if weight.nbytes < HEAVY else HEAVY_ROWS


def _has_mma(x: Tensor) -> bool:
    return x.dtype in HALF and not interpreted()


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    activation: str = "none",
    cut: FmaConfig | MmaConfig | None = None,
) -> Tensor:
    """act(gate) * up, or (norm(x) @ weight.T + bias) * scale + residual: [T, K] -> [T, N]; `cut` is for tuning."""
    gated = activation != "none"
    T, K = x.shape
    N = weight.shape[0] // 2 if gated else weight.shape[0]
    shape = {"gated": gated, "num_sms": sms(x.device)}
    if cut is None:
        cut = mma_config(N, K, **shape) if T > FMA_ROWS and _has_mma(x) else fma_config(N, K, T, **shape)
    x = x.detach().contiguous()
    y = torch.empty(T, N, dtype=x.dtype, device=x.device)
    if residual is not None:
        assert residual.shape == y.shape and residual.dtype == x.dtype, "the residual has the result's shape and dtype"
        residual = residual.detach().contiguous()
    w = weight.detach()
    b, r = w if bias is None else bias.detach(), x if residual is None else residual
    flags = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "ACTIVATION": activation}
    options = flags | {"K": K, "num_warps": cut.num_warps, **pdl(x.device)}
    if isinstance(cut, FmaConfig):
        _launch_fma(x, w, b, norm, r, y, scale, cut, options)
    else:
        _launch_mma(x if norm is None else rms_norm(x, *norm), w, b, r, y, scale, cut, options)
    return y


def _launch_fma(
    x: Tensor,
    w: Tensor,
    bias: Tensor,
    norm: Norm | None,
    residual: Tensor,
    y: Tensor,
    scale: float,
    cut: FmaConfig,
    options: dict[str, Any],
) -> None:
    (T, K), N = x.shape, y.shape[1]
    g, eps, offset = (w, 0.0, 0.0) if norm is None else (norm.weight.detach(), norm.eps, norm.offset)
    fma_kernel[(triton.cdiv(N, cut.block_n),)](
        x, w, bias, g, residual, y, N, float(eps), float(offset), float(scale),
        T=T, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, CHUNKS=triton.cdiv(K, cut.block_k), COPIES=cut.copies,
        NORM=norm is not None, num_stages=1, **options,
    )  # fmt: skip


def _launch_mma(
    x: Tensor,
    w: Tensor,
    bias: Tensor,
    residual: Tensor,
    y: Tensor,
    scale: float,
    cut: MmaConfig,
    options: dict[str, Any],
) -> None:
    (T, K), N = x.shape, y.shape[1]
    ahead = min(cut.ahead, triton.cdiv(K, cut.num_warps * BLOCK_K.value))
    mma_kernel[(triton.cdiv(N, BLOCK_N.value),)](
        x, w, bias, residual, y, T, N, float(scale),
        WARPS=cut.num_warps, BLOCK_T=max(8, triton.next_power_of_2(T)), AHEAD=ahead, **options,
    )  # fmt: skip
