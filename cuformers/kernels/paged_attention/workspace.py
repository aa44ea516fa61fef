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
    """[splits of any batch] int32, zero between launches: the last arrival puts it back."""


def workspace(num_heads: int, num_kv_heads: int, head_dim: int, num_sms: int, device: torch.device) -> Workspace:
    """Scratch for batches of any size, to be reused by every layer and step of one stream.

    A batch is split only as long as its programs are no more than 3 for each multiprocessor, or one sequence is.

    Example:
        >>> workspace(16, 8, 128, 132, torch.device("cpu")).out.shape
        torch.Size([792, 128])
    """
    programs = max(3 * num_sms, num_kv_heads * MAX_SPLITS)
    rows = programs * num_heads // num_kv_heads
    return Workspace(
        torch.empty(rows, head_dim, device=device, dtype=torch.float32),
        torch.empty(rows, 2, device=device, dtype=torch.float32),
        torch.zeros(programs, device=device, dtype=torch.int32),
    )
