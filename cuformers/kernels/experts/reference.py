"""Token-wise mixture of gated feed-forward blocks (arXiv 1701.06538): the specification."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cuformers.kernels.activation import ALPHA, CLAMPED_SWIGLU, LIMIT, activation_function
from cuformers.kernels.experts import Biases
from cuformers.kernels.precision import wide


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str,
    *,
    residual: Tensor | None = None,
    scale: float = 1.0,
    biases: Biases | None = None,
    interleaved: bool = False,
    gate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """See the package. One expert after the other, on the tokens that chose it."""
    assert gate is None or not interleaved, "a gate of the caller's takes gate before up"
    T, k = ids.shape
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(down)).tolist()

    def each(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Sorted rows, each by its expert's weight."""
        matrices = (weight.mT if interleaved else weight).unbind()
        shifts = [None] * len(matrices) if bias is None else bias.unbind()
        return torch.cat([F.linear(*one) for one in zip(rows.split(counts), matrices, shifts)])

    opened = each(x[order // k], gate_up, biases and biases.gate_up)
    h = gated(opened, activation, interleaved) if gate is None else gate(opened)
    found = each(h, down, biases and biases.down)[order.argsort()].view(T, k, x.shape[1])
    y = (wide(found) * weights[..., None]).sum(1) * scale
    return (y if residual is None else y + residual).to(x.dtype)


def gated(opened: Tensor, activation: str, interleaved: bool) -> Tensor:
    """act(gate) * up in float32, rounded once: [P, 2I] -> [P, I]."""
    gate, up = wide(opened).unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide(opened).chunk(2, dim=-1)
    if activation == CLAMPED_SWIGLU:
        gate = gate.clamp(max=LIMIT)
        h = gate * torch.sigmoid(ALPHA * gate) * (up.clamp(-LIMIT, LIMIT) + 1)
    else:
        h = activation_function(activation)(gate) * up
    return h.to(opened.dtype)
