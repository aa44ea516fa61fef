"""The specification of the values, which is that of `linear` and `gated_linear`; it promises no bits."""

from torch import Tensor

from cuformers.kernels.gated_linear.reference import gated_linear
from cuformers.kernels.linear.reference import linear
from cuformers.kernels.norm_args import Norm


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
    """(norm(x) @ weight.T + bias) * scale + residual."""
    del overwrite
    return linear(x, weight, bias, norm=norm, residual=residual, scale=scale)


def invariant_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, norm: Norm | None = None
) -> Tensor:
    """act(gate) * up with [gate, up] = norm(x) @ weight.T + bias."""
    return gated_linear(x, weight, bias, activation, norm=norm)
