"""Softmax routing with top-k (arXiv 1701.06538): the specification."""

from torch import Tensor

from cuformers.kernels.moe_route import Routes
from cuformers.kernels.precision import wide


def moe_route(logits: Tensor, top_k: int, *, normalise: bool) -> Routes:
    """See the package. Gradients flow to the logits through the weights."""
    logits = wide(logits)
    ranked = logits.detach().nan_to_num(nan=-float("inf"), posinf=float("inf"), neginf=-float("inf"))
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(dim=-1).gather(1, ids)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routes(weights, ids.int())
