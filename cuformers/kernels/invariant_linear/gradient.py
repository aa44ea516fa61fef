"""Gradients for values that kernels compute: the values stay the kernels', bit by bit, in training too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Recomputed(torch.autograd.Function):
    """The formula is computed anew in the backward pass."""

    @staticmethod
    def forward(ctx, values: Callable[..., Tensor], formula: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.formula = formula
        return values(*tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Any, ...]:
        need = ctx.needs_input_grad[2:]
        tensors = [t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, need, strict=True)]
        with torch.enable_grad():
            y = ctx.formula(*tensors)
        found = iter(torch.autograd.grad(y, [t for t in tensors if t.requires_grad], grads))
        return None, None, *(next(found) if n else None for n in need)


def recomputed(values: Callable[..., Tensor], formula: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """values(*tensors), whose gradient is that of formula(*tensors); each takes tensors and returns one."""
    return _Recomputed.apply(values, formula, *tensors)  # type: ignore[return-value]


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
