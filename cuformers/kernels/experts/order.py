"""Launches of the sort by expert."""

from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.kernels.experts.config import power_of_two
from cuformers.kernels.experts.order_kernel import count_kernel, place_kernel, tile_kernel
from cuformers.kernels.launch import pdl

STEP = 32
"""Pairs that a program looks at together."""


class Order(NamedTuple):
    """P = T * k pairs (token, choice), numbered token * k + choice, sorted by expert."""

    order: Tensor
    """[P], int32: the pair at each place."""
    places: Tensor
    """[P], int32: the place of each pair."""
    bounds: Tensor
    """[E + 1], int32: where each expert's places begin."""
    tiles: Tensor
    """[tiles, 3], int32: expert, first place and end of each tile; expert -1 where there is nothing to do."""


def sort_pairs(ids: Tensor, num_experts: int, block_m: int) -> Order:
    """The pairs of ids [T, k] int32, cut into tiles of up to block_m places of one expert; nothing waits for the host.

    Example:
        >>> sort_pairs(torch.tensor([[1, 0], [1, 2]], dtype=torch.int32), 3, 16).order  # doctest: +SKIP
        tensor([1, 0, 2, 3])
    """
    P, device = ids.numel(), ids.device
    chunk = 64 if P <= 4096 else 256
    chunks, block_e = -(-P // chunk), max(16, power_of_two(num_experts))
    num_tiles = min(num_experts, P) + P // block_m
    counts, before = torch.empty(2, chunks, block_e, dtype=torch.int32, device=device).unbind()
    order, places = torch.empty(2, P, dtype=torch.int32, device=device).unbind()
    bounds = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=device)
    sizes = {"CHUNK": chunk, "STEP": STEP, "BLOCK_E": block_e, "num_warps": 4, **pdl(device)}
    tables = {"BLOCK_M": block_m, "BLOCK_E": block_e, "SPAN": STEP, "num_warps": 8, **pdl(device)}
    count_kernel[(chunks,)](ids, counts, P, **sizes)
    tile_kernel[(1,)](counts, before, bounds, tiles, chunks, num_tiles, num_experts, **tables)
    place_kernel[(chunks,)](ids, before, bounds, order, places, P, num_experts, **sizes)
    return Order(order, places, bounds, tiles)
