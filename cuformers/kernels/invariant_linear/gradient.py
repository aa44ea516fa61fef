"""The gradient of a linear map whose values a kernel computes."""

from collections.abc import Callable

import torch
from torch import Tensor


class _Linear(torch.autograd.Function):
    """Saves the operands, so that nothing is computed twice."""

    @staticmethod
    def forward(
        ctx,
        values: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return values(x, weight, bias, residual=residual, scale=scale)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight), need = grads, ctx.saved_tensors, ctx.needs_input_grad[1:]
        scaled = grad if ctx.scale == 1.0 else grad * ctx.scale
        return (
            None,
            scaled @ weight if need[0] else None,
            scaled.t() @ x if need[1] else None,
            scaled.sum(0) if need[2] else None,
            grad if need[3] else None,
            None,
        )


def linear_map(
    values: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    residual: Tensor | None,
    scale: float,
) -> Tensor:
    """values(...), which are (x @ weight.T + bias) * scale + residual, with that gradient."""
    return _Linear.apply(values, x, weight, bias, residual, scale)  # type: ignore[return-value]
