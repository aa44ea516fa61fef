"""The norm that an op applies to its input on the way in."""

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """Arguments of an RMS norm: x / rms(x) * (offset + weight)."""

    weight: Tensor
    """[K], any float dtype."""
    eps: float
    """Added to the mean of squares."""
    offset: float = 0.0
    """1 in the Gemma families, whose weights are stored around zero."""
