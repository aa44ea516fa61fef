"""Scratch memory of split attention, which a caller may own so that splits merge inside one launch."""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_SPLITS = 32


class Workspace(NamedTuple):
    """Partial results of every split, and how many splits of each (sequence, kv head) have arrived."""

    out: Tensor
    """[rows, D] float32: unnormalised outputs."""
    stats: Tensor
    """[rows, 2] float32: running maximum (base 2) and sum of each partial result."""
    counters: Tensor
    """[max_n * Hkv at most] int32, zero between launches: the last arrival puts it back."""


def workspace(max_n: int, num_heads: int, head_dim: int, device: torch.device) -> Workspace:
    """Scratch for batches up to max_n, to be reused by every layer and step of one stream.

    Example:
        >>> work = workspace(64, 16, 128, torch.device("cpu"))
        >>> work.stats.shape[1]
        2
    """
    rows = max_n * num_heads * MAX_SPLITS
    return Workspace(
        torch.empty(rows, head_dim, device=device, dtype=torch.float32),
        torch.empty(rows, 2, device=device, dtype=torch.float32),
        torch.zeros(max_n * num_heads, device=device, dtype=torch.int32),
    )
