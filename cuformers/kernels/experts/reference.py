"""Token-wise mixture of gated feed-forward blocks (arXiv 1701.06538): the specification."""

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
) -> Tensor:
    """See the package. One expert after the other, on the tokens that chose it."""
    T, k = ids.shape
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(down)).tolist()
    parts = []
    for rows, first, second in zip((x[order // k]).split(counts), gate_up.unbind(), down.unbind()):
        parts.append(F.linear(gated_activation(F.linear(rows, first), activation), second))
    found = torch.cat(parts)[order.argsort()].view(T, k, down.shape[1])
    y = (wide(found) * weights[..., None]).sum(1) * scale
    return (y if residual is None else y + residual).to(x.dtype)
