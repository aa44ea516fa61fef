"""Sampling in six launches, two of which leave at once unless a row is flat; greedy in two. The host sees no value."""

import torch
import triton
from torch import Tensor

from cuformers.kernels.launch import pdl
from cuformers.kernels.sample.draw_kernel import draw_kernel, pick_kernel
from cuformers.kernels.sample.flat_kernel import collect_kernel, histogram_kernel
from cuformers.kernels.sample.threshold_kernel import row_kernel, split_kernel

CANDIDATES = 64
"""Slots for each split's largest logits."""
SPLIT = 4096
"""Tokens that one program of the first stages handles, for vocabularies up to 64 times that."""
STRIPE = 32
"""Neighbouring tokens that go to one split: 64 bytes of bf16."""
BINS = 2048
"""Of the histogram of a flat row."""
ROOM = 4096
"""Tokens of the decisive bins that fit the registers of one program."""
SHIFTS = {torch.bfloat16: 16, torch.float16: 13}
"""Low bits of float32 that a dtype's numbers never have."""


def argmax(logits: Tensor) -> Tensor:
    """See the package."""
    return _draw(logits.detach().contiguous(), None)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """See the package."""
    logits = logits.detach().contiguous()
    lowest = thresholds(logits, temperature, top_k, top_p, min_p)
    return _draw(logits, (temperature, lowest, seeds, positions))


def thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Least scaled logit that each row's filters keep, float32 [B]; -inf where nothing is filtered or it is greedy."""
    logits = logits.detach().contiguous()
    B, V = logits.shape
    device = logits.device
    size = SPLIT if V <= 64 * SPLIT else triton.next_power_of_2(triton.cdiv(V, 64))
    splits = triton.cdiv(V, size)
    candidates = torch.empty(B, splits, CANDIDATES, dtype=torch.float32, device=device)
    counts, cuts = torch.empty(2, B, splits, dtype=torch.int32, device=device)
    tops, lows, sums = torch.empty(3, B, splits, dtype=torch.float32, device=device)
    out = torch.empty(B, dtype=torch.float32, device=device)
    flat = torch.empty(B, 3, dtype=torch.int32, device=device)
    scales = torch.empty(B, 2, dtype=torch.float32, device=device)
    bins = (scales, *(torch.empty(B, BINS, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64)))
    collected = torch.empty(B, ROOM, dtype=torch.float32, device=device)
    found = (candidates, counts, cuts, tops, lows, sums)
    filters = (temperature, top_k, top_p, min_p)
    shift = {"SHIFT": SHIFTS.get(logits.dtype, 0), **pdl(device)}
    shape = {"SPLITS": splits, "CANDIDATES": CANDIDATES, **shift}
    split_kernel[(B, splits)](logits, *filters, *found, V, BLOCK=size, STRIPE=STRIPE, num_warps=8, **shape)
    row_kernel[(B,)](
        *filters, *found, out, flat, *bins, V,
        SPLITS_BLOCK=triton.next_power_of_2(splits), BINS=BINS, num_warps=8, **shape,
    )  # fmt: skip
    grid = (B, triton.cdiv(V, SPLIT))
    histogram_kernel[grid](
        logits, temperature, flat, *bins, V, BINS=BINS, BLOCK=SPLIT, num_warps=8, **pdl(device)
    )  # fmt: skip
    collect_kernel[grid](
        logits, temperature, top_k, top_p, flat, *bins, collected, out, V,
        BINS=BINS, BLOCK=SPLIT, ROOM=ROOM, num_warps=8, **shift,
    )  # fmt: skip
    return out


def _draw(logits: Tensor, noise: tuple[Tensor, Tensor, Tensor, Tensor] | None) -> Tensor:
    """[B] int64: the argmax, with Gumbel noise where (temperature, thresholds, seeds, positions) are given."""
    B, V = logits.shape
    block = 2048 if B <= 32 else 8192
    splits = triton.cdiv(V, block)
    values = torch.empty(B, splits, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(B, splits, dtype=torch.int32, device=logits.device)
    out = torch.empty(B, dtype=torch.int64, device=logits.device)
    launch = pdl(logits.device)
    draw_kernel[(B, splits)](
        logits, *(noise or (logits,) * 4), values, tokens, V,
        BLOCK=block, GREEDY=noise is None, num_warps=4 if block == 2048 else 8, **launch,
    )  # fmt: skip
    pick_kernel[(B,)](values, tokens, out, splits, BLOCK=triton.next_power_of_2(splits), num_warps=1, **launch)
    return out
