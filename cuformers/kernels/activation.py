"""The activations that gated layers use, by the name the ops take."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from cuformers.base.errors import bad_argument

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


CLAMPED_SWIGLU = "clamped_swiglu"
"""gate * sigmoid(ALPHA * gate) * (up + 1), with gate up to LIMIT and up within it (gpt-oss): of op `experts` alone."""
ALPHA, LIMIT = 1.702, 7.0


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The function of that name.

    Raises:
        ValueError: unknown name.
    """
    if name not in ACTIVATIONS:
        raise bad_argument("activation", name, f"one of {list(ACTIVATIONS)}")
    return ACTIVATIONS[name]
