"""A linear map with its norm and residual: our kernels up to 16 rows, where weights are the cost; cuBLAS above."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cuformers.kernels.linear.skinny import skinny, takes
from cuformers.kernels.norm.triton import rms_norm
from cuformers.kernels.norm_args import Norm


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    overwrite: bool = False,
) -> Tensor:
    """See the package."""
    if takes(x, weight):
        return skinny(x, weight, bias, norm=norm, residual=residual, scale=scale)
    if norm is not None:
        x = rms_norm(x, *norm)
    if residual is None:
        y = F.linear(x, weight, bias)
        return y if scale == 1.0 else y.mul_(scale)
    if bias is None and overwrite:
        return residual.detach().addmm_(x, weight.t(), alpha=scale)
    if bias is None:
        # The residual enters cuBLAS's float32 epilogue. It is copied first, as a hook may hold the residual itself.
        return torch.addmm(residual.detach(), x, weight.t(), alpha=scale)
    return torch.add(residual, F.linear(x, weight, bias), alpha=scale)
