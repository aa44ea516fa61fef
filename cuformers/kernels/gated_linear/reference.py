"""The first half of a gated feed-forward block (arXiv 2002.05202): the specification."""

from torch import Tensor

from cuformers.kernels.activation import activation_function
from cuformers.kernels.linear.reference import linear
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.precision import wide


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up in float32, rounded once: [T, 2I] -> [T, I]; the first I columns are the gate."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return (activation_function(activation)(gate) * up).to(gate_up.dtype)


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, norm: Norm | None = None
) -> Tensor:
    """act(gate) * up with [gate, up] = norm(x) @ weight.T + bias."""
    return gated_activation(linear(x, weight, bias, norm=norm), activation)
