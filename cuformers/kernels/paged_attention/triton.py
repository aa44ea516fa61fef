"""Decode attention over the paged cache: how tiles are cut, and the launches."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from cuformers.kernels.attention_plan import AttentionPlan
from cuformers.kernels.attention_plan.triton import attention_plan
from cuformers.kernels.cache_scales import CacheScales
from cuformers.kernels.launch import interpreted, pdl, sms
from cuformers.kernels.paged_attention.fp8_kernel import fp8_attention_kernel
from cuformers.kernels.paged_attention.kernel import attention_kernel
from cuformers.kernels.paged_attention.merge_kernel import merge_kernel
from cuformers.kernels.pages import readable

LOG2E = 1.4426950408889634
MANY_ROWS = 64
"""Split rows from which on `merge_config` thinks them many."""


class AttentionConfig(NamedTuple):
    """How a program goes through its keys."""

    block_s: int
    """Keys per tile."""
    num_warps: int
    """Warps per program."""
    stages: int
    """Tiles in flight in the loop."""
    early: bool
    """Whether the first tile is asked for before the wait for the kernel before: it shortens what is short."""


def config(N: int, num_kv_heads: int, head_dim: int, itemsize: int, *, num_sms: int = 132) -> AttentionConfig:
    """The rule for a batch of N: it depends on no length, so that a captured graph serves every length.

    Example:
        >>> config(1, 8, 128, 2)
        AttentionConfig(block_s=64, num_warps=4, stages=2, early=True)
    """
    block_s = 64 if head_dim * itemsize <= 256 else 32
    if N * num_kv_heads <= num_sms:
        return AttentionConfig(block_s, 4, 2, True)
    return AttentionConfig(block_s, 2, 3, False)


class MergeConfig(NamedTuple):
    """How the parts of split rows are merged."""

    block_p: int
    """Parts that a program holds at once."""
    num_warps: int
    """Warps per program."""
    per_sm: int
    """Programs for each multiprocessor, at the most: idle ones cost time."""


def merge_config(rows: int) -> MergeConfig:
    """The rule for up to `rows` split rows: of many rows each has few parts.

    Example:
        >>> merge_config(1)
        MergeConfig(block_p=32, num_warps=4, per_sm=8)
    """
    return MergeConfig(32, 4, 8) if rows <= MANY_ROWS else MergeConfig(4, 1, 32)


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
    scales: CacheScales | None = None,
    plan: AttentionPlan | None = None,
    newest: int = 1,
    cut: AttentionConfig | None = None,
) -> Tensor:
    """See the package. `cut` overrides the rule, for tuning."""
    q = readable(q.detach(), k_cache, v_cache, scales)
    N, num_heads, D = q.shape
    HKV = k_cache.shape[1]
    out = torch.empty((N, num_heads, D), dtype=q.dtype, device=q.device)
    if N == 0:
        return out
    chain = pdl(q.device)
    # A plan of our own is the launch just before: the kernel may not read it early.
    launch = chain if plan is not None else {"PDL": False}
    plan = plan or attention_plan(lengths, num_kv_heads=HKV, window=window)
    cut = cut or config(N, HKV, D, q.element_size(), num_sms=sms(q.device))
    part = torch.empty((plan.items.shape[0], num_heads, D), dtype=torch.float32, device=q.device)
    stats = torch.empty((plan.items.shape[0], num_heads, 2), dtype=torch.float32, device=q.device)
    sink = q if sinks is None else sinks.detach()
    shape = {"D": D, "BLOCK_D": triton.next_power_of_2(D), "SINKS": sinks is not None}
    operands = (block_tables, plan.items, sink, out, part, stats)
    numbers = (float(scale if softcap is not None else scale * LOG2E), float(softcap or 0.0))
    options = {"EARLY": cut.early and newest == 1, "SOFTCAP": softcap is not None, "SINKS": sinks is not None} | launch
    if scales is None:
        _launch(q, k_cache, v_cache, operands, numbers, options, cut)
    else:
        _launch_fp8(q, k_cache, v_cache, scales, operands, numbers, options, cut)
    rows = plan.split_rows.shape[0]
    merge = merge_config(rows)
    merge_kernel[(min(rows, max(1, merge.per_sm * sms(q.device) // num_heads)), num_heads)](
        part, stats, sink, out, plan.split_rows, rows, HQ=num_heads, BLOCK_P=merge.block_p, num_warps=merge.num_warps,
        **shape, **chain,
    )  # fmt: skip
    return out


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    operands: tuple[Tensor, ...],
    numbers: tuple[float, float],
    options: dict[str, Any],
    cut: AttentionConfig,
) -> None:
    """`operands`: block tables, items, sinks, then what is written; `numbers`: scale and softcap."""
    HKV, PAGE, D = k_cache.shape[1:]
    G = q.shape[1] // HKV
    attention_kernel[(operands[1].shape[0] * HKV,)](
        q, k_cache, v_cache, *operands,
        q.stride(0), operands[0].stride(0), k_cache.stride(0), v_cache.stride(0), *numbers,
        HKV=HKV, G=G, D=D, BLOCK_D=triton.next_power_of_2(D), PAGE=PAGE, BLOCK_M=max(16, triton.next_power_of_2(G)),
        BLOCK_S=cut.block_s, STAGES=cut.stages, UPCAST=interpreted(), num_warps=cut.num_warps, **options,
    )  # fmt: skip


def _launch_fp8(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: CacheScales,
    operands: tuple[Tensor, ...],
    numbers: tuple[float, float],
    options: dict[str, Any],
    cut: AttentionConfig,
) -> None:
    """The same over pages as pairs of numbers."""
    keys, values = k_cache.view(torch.int16), v_cache.view(torch.int16)
    HKV, PAGE, D = keys.shape[1:]
    G = q.shape[1] // HKV
    fp8_attention_kernel[(operands[1].shape[0] * HKV,)](
        q, keys, values, *scales, *operands,
        q.stride(0), operands[0].stride(0), keys.stride(0), values.stride(0), scales.keys.stride(0), *numbers,
        HKV=HKV, G=G, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), PAGE=PAGE,
        BLOCK_M=max(16, triton.next_power_of_2(G)), BLOCK_S=cut.block_s, STAGES=cut.stages, EMULATED=interpreted(),
        num_warps=cut.num_warps, **options,
    )  # fmt: skip
