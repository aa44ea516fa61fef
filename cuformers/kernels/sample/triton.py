"""Sampling in four launches, greedy in two; the host looks at no value."""

import torch
import triton
from torch import Tensor

from cuformers.kernels.launch import pdl
from cuformers.kernels.sample.draw_kernel import draw_kernel, pick_kernel
from cuformers.kernels.sample.threshold_kernel import row_kernel, split_kernel

CANDIDATES = 64
"""Slots for each split's largest logits."""
SPLIT = 4096
"""Tokens that one program of the first stages handles, for vocabularies up to 64 times that."""
STRIPE = 32
"""Neighbouring tokens that go to one split: 64 bytes of bf16."""


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
    peaks, sums = torch.empty(2, B, splits, dtype=torch.float32, device=device)
    out = torch.empty(B, dtype=torch.float32, device=device)
    filters = (temperature, top_k, top_p, min_p)
    found = (candidates, counts, cuts, peaks, sums)
    shape = {"SPLITS": splits, "CANDIDATES": CANDIDATES, **pdl(device)}
    split_kernel[(B, splits)](logits, *filters, *found, V, BLOCK=size, STRIPE=STRIPE, num_warps=8, **shape)
    row_kernel[(B,)](
        logits, *filters, *found, out, V, SPLITS_BLOCK=triton.next_power_of_2(splits), BLOCK=SPLIT, num_warps=8, **shape
    )
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
