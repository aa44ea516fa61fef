"""Launches of the sort by expert."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuformers.kernels.experts.config import power_of_two
from cuformers.kernels.experts.order_kernel import count_kernel, place_kernel, rank_kernel, tile_kernel
from cuformers.kernels.launch import pdl

FEW_PAIRS, WIDE = 1024, 128
"""Up to so many are compared each with each, with WIDE at a time."""
CHUNK, STEP = 256, 32
"""Pairs of a program of the counting sort, and how many it looks at together."""


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
    """The pairs of ids [T, k] int32, in tiles of up to block_m places of one expert; the host waits for nothing."""
    P, device, block_e = ids.numel(), ids.device, max(16, power_of_two(num_experts))
    order, places = torch.empty(2, P, dtype=torch.int32, device=device).unbind()
    bounds = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tiles = torch.empty(min(num_experts, P) + P // block_m, 3, dtype=torch.int32, device=device)
    made = Order(order, places, bounds, tiles)
    cut: dict[str, Any] = {"BLOCK_M": block_m, "BLOCK_E": block_e, "SPAN": STEP, "num_warps": 8, **pdl(device)}
    if P <= FEW_PAIRS:
        cut["WIDE"] = WIDE
        rank_kernel[(1 + -(-P // STEP),)](ids, *made, P, len(tiles), num_experts, **cut)
        return made
    chunks = -(-P // CHUNK)
    counts, before = torch.empty(2, chunks, block_e, dtype=torch.int32, device=device).unbind()
    sizes: dict[str, Any] = {"CHUNK": CHUNK, "STEP": STEP, "BLOCK_E": block_e, "num_warps": 4, **pdl(device)}
    count_kernel[(chunks,)](ids, counts, P, **sizes)
    tile_kernel[(1,)](counts, before, bounds, tiles, chunks, len(tiles), num_experts, **cut)
    place_kernel[(chunks,)](ids, before, bounds, order, places, P, num_experts, **sizes)
    return made
