"""RMS norm, alone and with the residual stream's addition before or after it: the specification."""

import torch
from torch import Tensor

from cuformers.kernels.precision import wide


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (offset + weight) over the last dim, in float32, cast to x's dtype at the end."""
    h = wide(x)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * (offset + wide(weight))).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual, rounded to the dtype first."""
    s = x + residual
    return rms_norm(s, weight, eps, offset), s


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """residual + rms_norm(x); the norm is rounded to the dtype before the addition."""
    return residual + rms_norm(x, weight, eps, offset)
