"""A linear map with what may ride on it: a norm before, a scale and the residual after. The specification."""

from torch import Tensor
from torch.nn import functional as F

from cuformers.kernels.norm.reference import rms_norm
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
    """(norm(x) @ weight.T + bias) * scale + residual.

    The product is torch's own in the dtype of x (float32 accumulation inside), so that training uses tensor cores;
    an oracle calls this on upcast inputs.
    """
    del overwrite
    if norm is not None:
        x = rms_norm(x, *norm)
    y = F.linear(x, weight, bias)
    y = y if scale == 1.0 else y * scale
    return y if residual is None else y + residual
