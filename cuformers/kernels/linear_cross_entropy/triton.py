"""linear_cross_entropy by chunks; the total's gradients are formed in the forward pass, others by a second walk."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cuformers.kernels.linear_cross_entropy import TokenLosses, check_labels
from cuformers.kernels.linear_cross_entropy.chunks import Gradients, Head, Wanted, losses, losses_and_gradients


class _Losses(torch.autograd.Function):
    """(total, nll, entropy or None)."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None, head: Head, entropy: bool, ahead: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        wanted = Wanted(*ctx.needs_input_grad[:2])
        ctx.head, ctx.ahead = head, ahead and any(wanted)
        gradients = Gradients(None, None)
        if ctx.ahead:
            by_nll = weights if weights is not None else x.new_ones(len(x), dtype=torch.float32)
            nll, uncertainty, gradients = losses_and_gradients(x, weight, labels, head, entropy, by_nll, None, wanted)
        else:
            nll, uncertainty = losses(x, weight, labels, head, entropy)
        ctx.save_for_backward(x, weight, labels, weights, nll, *gradients)
        return _total(nll, weights), nll, uncertainty

    @staticmethod
    @once_differentiable
    def backward(ctx, by_total: Tensor | None, by_nll: Tensor | None, by_entropy: Tensor | None):
        x, weight, labels, weights, nll, *formed = ctx.saved_tensors
        wanted = Wanted(*ctx.needs_input_grad[:2])
        by_x = by_weight = None
        if ctx.ahead and by_total is not None and by_nll is None and by_entropy is None:
            by_x, by_weight = (_rounded(g, by_total, x.dtype) for g in formed)
        elif any(wanted):
            each = _gradient_of_nll(nll, weights, by_total, by_nll)
            spread = None if by_entropy is None else by_entropy.contiguous()
            *_, formed = losses_and_gradients(x, weight, labels, ctx.head, spread is not None, each, spread, wanted)
            by_x, by_weight = (None if g is None else g.to(x.dtype) for g in formed)
        by_weights = by_total * nll if ctx.needs_input_grad[3] and by_total is not None else None
        return by_x, by_weight, None, by_weights, None, None, None


def _total(nll: Tensor, weights: Tensor | None) -> Tensor:
    return (nll if weights is None else nll * weights).sum()


def _rounded(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """gradient * factor, rounded once, with no copy in float32; the gradient stays for another backward pass."""
    return None if gradient is None else torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _gradient_of_nll(nll: Tensor, weights: Tensor | None, by_total: Tensor | None, by_nll: Tensor | None) -> Tensor:
    """What comes to each token's nll by itself and through the total."""
    each = torch.zeros_like(nll) if by_nll is None else by_nll
    if by_total is None:
        return each.contiguous()
    return each + (by_total if weights is None else by_total * weights)


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
    """See the package."""
    check_labels(labels, len(weight), ignore_index)
    if torch.is_autocast_enabled(x.device.type):
        x, weight = (t.to(torch.get_autocast_dtype(x.device.type)) for t in (x, weight))
    assert x.dtype == weight.dtype, "x and the head share one dtype"
    head = Head(scale=scale, softcap=softcap, ignore_index=ignore_index)
    x, weight, labels = x.contiguous(), weight.contiguous(), labels.contiguous()
    weights = None if weights is None else weights.float().contiguous()
    with torch.autocast(x.device.type, enabled=False):
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, weights)):
            return TokenLosses(*_Losses.apply(x, weight, labels, weights, head, entropy, ahead))  # type: ignore[misc]
        nll, uncertainty = losses(x.detach(), weight.detach(), labels, head, entropy)
        return TokenLosses(_total(nll, weights), nll, uncertainty)
