"""Token-wise mixture of gated feed-forward blocks (arXiv 1701.06538): the specification."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cuformers.kernels.gated_linear.reference import gated_activation
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
    gate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """See the package. One expert after the other, on the tokens that chose it."""
    T, k = ids.shape
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(down)).tolist()

    def each(rows: Tensor, weight: Tensor) -> Tensor:
        """Sorted rows, each by its expert's weight."""
        return torch.cat([F.linear(part, one) for part, one in zip(rows.split(counts), weight.unbind())])

    opened = each(x[order // k], gate_up)
    h = gated_activation(opened, activation) if gate is None else gate(opened)
    found = each(h, down)[order.argsort()].view(T, k, down.shape[1])
    y = (wide(found) * weights[..., None]).sum(1) * scale
    return (y if residual is None else y + residual).to(x.dtype)
