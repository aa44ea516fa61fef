"""Decode attention over the paged cache: how work is split, and the launches."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.kernels.launch import interpreted, pdl, sms
from cuformers.kernels.paged_attention.kernel import attention_kernel
from cuformers.kernels.paged_attention.merge_kernel import merge_kernel
from cuformers.kernels.paged_attention.workspace import MAX_SPLITS, Workspace

LOG2E = 1.4426950408889634
MAX_GROUP_HERE = 8
"""Query heads per kv head up to which the last program merges; it does so two heads at a time."""


class AttentionConfig(NamedTuple):
    """How decode attention is cut."""

    splits: int
    """Stretches that a sequence's keys are cut into at the most; a power of two."""
    block_s: int
    """Keys per tile."""
    least: int
    """Keys per stretch at the least, a multiple of block_s."""
    num_warps: int
    """Warps per program."""
    stages: int
    """Tiles in flight in the loop."""


def config(N: int, num_kv_heads: int, head_dim: int, *, num_sms: int = 132) -> AttentionConfig:
    """The cut for a batch of N: it depends on no length, so that a captured graph serves every length.

    Example:
        >>> config(1, 8, 128).splits, config(256, 8, 128).splits
        (32, 1)
    """
    splits = 1
    while 2 * splits * N * num_kv_heads <= 3 * num_sms and splits < MAX_SPLITS:
        splits *= 2
    block_s = 64 if head_dim <= 128 else 32
    # One tile a stretch where there are few: on an H200 more programs beat fewer merges (2 tiles: 637 us a step of
    # Qwen3-0.6B against 582, 4 tiles: 722).
    return AttentionConfig(splits, block_s, block_s, 4, 3)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    fresh: int = 1,
    workspace: Workspace | None = None,
    cut: AttentionConfig | None = None,
) -> Tensor:
    """See the package. `cut` overrides the rule, for tuning."""
    q = _checked(q.detach(), k_cache, v_cache)
    N, num_heads = q.shape[:2]
    HKV, PAGE, D = k_cache.shape[1:]
    G = num_heads // HKV
    cut = cut or config(N, HKV, D, num_sms=sms(q.device))
    assert cut.least > 0 and cut.least % cut.block_s == 0, "a stretch is whole tiles"
    out = torch.empty((N, num_heads, D), dtype=q.dtype, device=q.device)
    if N == 0:
        return out
    here = workspace is not None and G <= MAX_GROUP_HERE
    part, stats, counters = workspace or _scratch(N * num_heads * cut.splits, D, q.device)
    assert cut.splits == 1 or part.shape[0] >= N * num_heads * cut.splits, "the workspace is too small for this batch"
    sink = q if sinks is None else sinks.detach()
    shape = {
        "HKV": HKV, "G": G, "D": D, "BLOCK_D": triton.next_power_of_2(D), "BLOCK_S": cut.block_s, "LEAST": cut.least,
        "SPLITS": cut.splits, "WINDOW": window is not None, "SINKS": sinks is not None, **pdl(q.device),
    }  # fmt: skip
    attention_kernel[(N * HKV, cut.splits)](
        q, k_cache, v_cache, block_tables, lengths, sink, out, part, stats, counters,
        q.stride(0), block_tables.stride(0), k_cache.stride(0), v_cache.stride(0),
        float(scale if softcap is not None else scale * LOG2E), float(softcap or 0.0), window or 0, fresh,
        PAGE=PAGE, BLOCK_M=max(16, triton.next_power_of_2(G)), STAGES=cut.stages, SOFTCAP=softcap is not None,
        MERGE="here" if here else "later", UPCAST=interpreted(), num_warps=cut.num_warps, **shape,
    )  # fmt: skip
    if cut.splits > 1 and not here:
        merge_kernel[(N * HKV, G)](part, stats, sink, out, lengths, window or 0, num_warps=4, **shape)
    return out


def _scratch(rows: int, D: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Partial results of one call; without counters, which would have to be zeroed."""
    part = torch.empty(rows, D, dtype=torch.float32, device=device)
    stats = torch.empty(rows, 2, dtype=torch.float32, device=device)
    return part, stats, stats


def _checked(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """q with contiguous heads; it may be a slice of the qkv rows."""
    PAGE, D = k_cache.shape[2:]
    if PAGE < 16 or PAGE & (PAGE - 1):
        raise bad_argument("page_size", PAGE, "a power of two from 16 on")
    if not 16 <= D <= 256:
        raise bad_argument("head_dim", D, "16 to 256", "Use kernels='reference' for this model.")
    if q.shape[1] % k_cache.shape[1]:
        raise bad_argument("num_heads", q.shape[1], f"a multiple of num_kv_heads={k_cache.shape[1]}")
    pages_are_contiguous = k_cache[:1].is_contiguous() and v_cache[:1].is_contiguous()
    assert pages_are_contiguous and k_cache.dtype == q.dtype, "pages are contiguous, in the model's dtype"
    return q if q.stride(1) == D and q.stride(2) == 1 else q.contiguous()
