"""What the references compute in."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in float32; float64 stays, so that gradients can be checked numerically."""
    return x if x.dtype == torch.float64 else x.float()
