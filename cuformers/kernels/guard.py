"""What stands before a kernel: a gradient that someone asks for is given, and a launch goes where its tensors are."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from cuformers.cuda.device import device_count, on


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


def where_tensors_are(function: Callable, device_type: str = "cuda") -> Callable:
    """The function with the first tensor's GPU being the current one, which is where Triton launches.

    Where there are not several GPUs it is the function itself.
    """
    if device_type != "cuda" or device_count() < 2:
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = next(_tensors((*args, *kwargs.values())), None)
        with on("cpu" if first is None else first.device):
            return function(*args, **kwargs)

    return call


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
