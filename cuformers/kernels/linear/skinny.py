"""Launches of the skinny products."""

import torch
from torch import Tensor

from cuformers.kernels.launch import interpreted, pdl, sms
from cuformers.kernels.linear.config import FMA_ROWS, MAX_ROWS, SkinnyConfig, config
from cuformers.kernels.linear.skinny_kernel import dot_kernel, fma_kernel
from cuformers.kernels.norm.triton import rms_norm
from cuformers.kernels.norm_args import Norm

MAX_K = 16384
"""Above this a program's weights do not fit its registers."""
WIDE = 65536
"""From so many outputs on, which only heads have, cuBLAS is as fast or faster at 2 rows and more."""


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the skinny kernels serve the product of x [T, K] with weight [N, K]."""
    T, K = x.shape
    most = 1 if weight.shape[0] >= WIDE else MAX_ROWS
    return 0 < T <= most and K <= MAX_K and weight.is_contiguous() and weight.dtype == x.dtype


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    activation: str = "none",
    cut: SkinnyConfig | None = None,
) -> Tensor:
    """act(gate) * up, or (norm(x) @ weight.T + bias) * scale + residual: [T, K] -> [T, N], T up to MAX_ROWS."""
    gated = activation != "none"
    T, K = x.shape
    N = weight.shape[0] // 2 if gated else weight.shape[0]
    cut = cut or config(N, K, T, gated=gated, num_sms=sms(x.device))
    x = x.detach().contiguous()
    y = torch.empty(T, N, dtype=x.dtype, device=x.device)
    if residual is not None:
        assert residual.shape == y.shape and residual.dtype == x.dtype, "the residual has the result's shape and dtype"
        residual = residual.detach().contiguous()
    common = {
        "K": K, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k, "BIAS": bias is not None, "ACTIVATION": activation,
        "RESIDUAL": residual is not None, "num_warps": cut.num_warps, "num_stages": 1, **pdl(x.device),
    }  # fmt: skip
    grid = (-(-N // cut.block_n),)
    w = weight.detach()
    b = w if bias is None else bias.detach()
    r = x if residual is None else residual
    if T <= FMA_ROWS:
        g, eps, offset = (w, 0.0, 0.0) if norm is None else (norm.weight.detach(), norm.eps, norm.offset)
        fma_kernel[grid](
            x, w, b, g, r, y, N, float(eps), float(offset), float(scale),
            T=T, CHUNKS=-(-K // cut.block_k), COPIES=cut.copies, NORM=norm is not None, **common,
        )  # fmt: skip
        return y
    if norm is not None:
        x = rms_norm(x, *norm)
    dot_kernel[grid](x, w, b, r, y, T, N, float(scale), SLICES=cut.slices, UPCAST=interpreted(), **common)
    return y
