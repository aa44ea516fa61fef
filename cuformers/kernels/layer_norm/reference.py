"""Layer norm, alone or of a sum: the specification."""

import torch
from torch import Tensor

from cuformers.kernels.precision import wide


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim, in float32, cast to x's dtype at the end.

    With a residual x stands for x + residual, rounded to the dtype first. The variance divides by H.
    """
    h = wide(x if residual is None else x + residual)
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * wide(weight)
    return (h if bias is None else h + wide(bias)).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(s), s) with s = x + residual, rounded to the dtype first."""
    s = x + residual
    return layer_norm(s, weight, bias, eps), s
