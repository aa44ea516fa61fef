"""Gradients for values that kernels compute: the values stay the kernels', bit by bit, in training too."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class _Recomputed(torch.autograd.Function):
    """The formula is computed anew in the backward pass."""

    @staticmethod
    def forward(ctx, values: Callable[..., Any], formula: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.formula = formula
        results = values(*tensors)
        if isinstance(results, tuple):
            ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Any, ...]:
        need = ctx.needs_input_grad[2:]
        tensors = [t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, need, strict=True)]
        with torch.enable_grad():
            results = ctx.formula(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        outputs, gradients = zip(*((r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad))
        wanted = [t for t in tensors if t.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
        return None, None, *(next(found) if n else None for n in need)


def recomputed(values: Callable[..., Any], formula: Callable[..., Any], *tensors: Tensor) -> Any:
    """values(*tensors), with the gradient of formula(*tensors); each returns a tensor or a tuple of tensors."""
    return _Recomputed.apply(values, formula, *tensors)


def with_gradient(function: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """The function's values with the reference's gradient, for an op whose tensors are its first arguments."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        assert not any(isinstance(v, Tensor) for v in kwargs.values()), "tensors are given by position"
        count = sum(isinstance(a, Tensor) for a in args)
        tensors, rest = args[:count], args[count:]
        return recomputed(
            lambda *t: function(*t, *rest, **kwargs), lambda *t: reference(*t, *rest, **kwargs), *tensors
        )

    return call
