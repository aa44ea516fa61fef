"""How the experts' products are cut: by shapes only, as a captured graph serves any routing."""

from typing import NamedTuple

import torch

from cuformers.kernels.linear.config import fma_config

FEW_TOKENS = 4
"""Up to this many tokens each has its experts to itself: hardly any two share one, and nothing is sorted."""
SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
"""Shared memory that a program may have, KiB, by compute capability; 99 on the others."""
SPARE = 4
"""KiB of it that are left for reductions and barriers."""


class GroupedConfig(NamedTuple):
    """How a grouped product is cut."""

    block_m: int
    """Rows of one expert; 16, 32, 64 or 128."""
    block_n: int
    """Outputs per program."""
    block_k: int
    """Columns per step of the K loop."""
    num_warps: int
    stages: int
    """Steps of the K loop in flight."""


class FewConfig(NamedTuple):
    """How the product of few tokens is cut."""

    block_n: int
    """Outputs per program."""
    block_k: int
    """Columns per chunk."""
    num_warps: int
    at_once: int = 1
    """Experts whose weights are asked for together."""

    @property
    def copies(self) -> int:
        """Rows of x that a program loads: see `linear.config.FmaConfig`."""
        return self.block_n if self.block_k <= 256 else 1


def rows_of_tile(pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """block_m for so many (token, choice) pairs: near what an expert gets if all get the same.

    Example:
        >>> rows_of_tile(64 * 8, 128, torch.bfloat16), rows_of_tile(16384 * 8, 128, torch.bfloat16)
        (16, 128)
    """
    share = pairs / num_experts
    most = 128 if dtype.itemsize == 2 else 32
    return min(most, 16 if share <= 16 else 64 if share <= 256 else 128)


def grouped(block_m: int, *, gated: bool, dtype: torch.dtype, on: tuple[int, int] | None) -> GroupedConfig:
    """The cut of a product of tiles of block_m rows, on a GPU of capability `on`."""
    if dtype.itemsize == 4:
        return GroupedConfig(block_m, 32, 32, 4, 2)
    if block_m <= 32:
        wanted = GroupedConfig(block_m, 32 if gated else 64, 128, 4, 4)
    elif block_m == 64:
        wanted = GroupedConfig(64, 64 if gated else 128, 64, 4, 4)
    else:
        wanted = GroupedConfig(128, 128 if gated else 256, 64, 8, 4)
    return _fitted(wanted, 2 if gated else 1, on)


def gradient(dtype: torch.dtype, on: tuple[int, int] | None) -> GroupedConfig:
    """The cut of the weights' gradients, whose K loop goes over an expert's rows."""
    if dtype.itemsize == 4:
        return GroupedConfig(32, 32, 32, 4, 2)
    return _fitted(GroupedConfig(128, 256, 64, 8, 4), 1, on)


def _fitted(wanted: GroupedConfig, outputs: int, on: tuple[int, int] | None) -> GroupedConfig:
    """As many stages, and on small cards as many outputs, as the shared memory holds; 2-byte elements.

    Args:
        outputs: matrices that block_n outputs are made of: 2 for gate and up.
    """
    if on is not None and on not in SHARED and wanted.block_m == 128:
        wanted = wanted._replace(block_n=wanted.block_n // 2)
    stage = (wanted.block_m + wanted.block_n * outputs) * wanted.block_k * 2
    room = (SHARED.get(on or (9, 0), 99) - SPARE) * 1024
    return wanted._replace(stages=max(1, min(wanted.stages, room // stage)))


def few_up(N: int, K: int, pairs: int, num_sms: int) -> FewConfig:
    """The cut of h [pairs, N] from K columns: that of one gated product as large as all pairs' together."""
    return FewConfig(*fma_config(N * pairs, K, 1, gated=True, num_sms=num_sms))


def few_down(K: int, top_k: int) -> FewConfig:
    """The cut of y from K columns of each of top_k experts.

    Up to 2048 columns a warp has a weight row to itself; the weights of as many experts as make 256 bytes a thread
    are in flight together.
    """
    block_n, block_k, num_warps = (4, 256, 4) if K <= 2048 else (1, 1024, 4) if K <= 8192 else (1, 2048, 8)
    each = 2 * K * block_n // (32 * num_warps)
    return FewConfig(block_n, block_k, num_warps, max(1, min(top_k, 256 // each)))


def power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << (n - 1).bit_length()
