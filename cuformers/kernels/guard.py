"""A gradient that someone asks for is given: implementations without one step aside for the reference."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def guarded(function: Callable, reference: Callable) -> Callable:
    """The function wherever no gradient is asked for, the reference where one is.

    A gradient is asked for when grad mode is on and a tensor among the arguments, those of a norm included, requires
    it. Without grad mode the cost is one look at it, a fraction of a microsecond, and nothing inside a CUDA graph.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and (_wants_gradient(args) or _wants_gradient(tuple(kwargs.values()))):
            return reference(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _wants_gradient(values: tuple[Any, ...]) -> bool:
    return any(
        value.requires_grad if isinstance(value, Tensor) else isinstance(value, tuple) and _wants_gradient(value)
        for value in values
    )
