"""linear_cross_entropy in plain PyTorch: the specification."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cuformers.kernels.linear_cross_entropy import TokenLosses, check_labels


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
    ahead: bool = True,
) -> TokenLosses:
    """See the package; autograd forms every gradient in the backward pass."""
    del ahead
    check_labels(labels, len(weight), ignore_index)
    ignored = labels == ignore_index
    wrong = ~ignored & ((labels < 0) | (labels >= len(weight)))
    z = F.linear(x.masked_fill(wrong[:, None], torch.nan), weight).float()
    z = z if scale == 1.0 else z * scale
    z = z if softcap is None else torch.tanh(z / softcap) * softcap
    nll = F.cross_entropy(z, labels.masked_fill(wrong, 0), ignore_index=ignore_index, reduction="none")
    uncertainty = None
    if entropy:
        every = z.log_softmax(-1)
        uncertainty = -(every.exp() * every).sum(-1).masked_fill(ignored, 0)
    return TokenLosses((nll if weights is None else nll * weights).sum(), nll, uncertainty)
