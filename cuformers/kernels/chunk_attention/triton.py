"""Attention of chunks over the paged cache: how work is cut, and the launch."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from cuformers.kernels.cache_scales import CacheScales
from cuformers.kernels.chunk_attention import hopper
from cuformers.kernels.chunk_attention.hopper import HopperConfig
from cuformers.kernels.chunk_attention.kernel import chunk_kernel
from cuformers.kernels.launch import interpreted, pdl
from cuformers.kernels.pages import readable

LOG2E = 1.4426950408889634


class ChunkConfig(NamedTuple):
    """How chunk attention is cut."""

    block_m: int
    """Rows of a tile: (query, query head of a group) pairs; a power of two."""
    block_s: int
    """Keys per tile."""
    num_warps: int
    """Warps per program."""
    stages: int
    """Tiles in flight in the loop."""


def config(rows: int, group: int, head_dim: int, dtype: torch.dtype) -> ChunkConfig:
    """The cut for chunks of `rows` (query, head) pairs on average: it depends on shapes only, as a graph's must.

    Example:
        >>> config(8192, 2, 128, torch.bfloat16).block_m, config(8, 2, 128, torch.bfloat16).block_m
        (128, 16)
    """
    half, padded = dtype.itemsize == 2, triton.next_power_of_2(head_dim)
    most = 16384 // padded if half else 4096 // padded
    block_m = min(max(16, triton.next_power_of_2(rows)), most, 128 if half else 32)
    block_m = max(block_m, triton.next_power_of_2(group))
    num_warps = 8 if block_m * padded > (8192 if half else 2048) or block_m >= 128 else 4
    # With three stages the pages of a tile are read one tile ahead too, at no cost in shared memory.
    return ChunkConfig(block_m, 64 if half and padded <= 128 else 32, num_warps, 3)


def chunk_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    bounds: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: CacheScales | None = None,
    cut: ChunkConfig | HopperConfig | None = None,
) -> Tensor:
    """See the package. `cut` overrides the rule, for tuning."""
    q = readable(q.detach(), k_cache, v_cache, scales)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q) == 0:
        return out
    cut = cut or _rule(q, k_cache, v_cache, rows.shape[0])
    tables = (block_tables, bounds, rows, lengths)
    numbers = (float(scale if softcap is not None else scale * LOG2E), float(softcap or 0.0), window or 0)
    flags = {"WINDOW": window is not None, "SOFTCAP": softcap is not None, "SINKS": sinks is not None}
    operands = (q, k_cache, v_cache, tables, q if sinks is None else sinks.detach(), out, numbers, flags)
    if isinstance(cut, ChunkConfig):
        _launch(*operands, scales, cut)
    else:
        assert scales is None, "the Hopper kernel takes no fp8 cache"
        hopper.launch(*operands, cut)
    return out


def _rule(q: Tensor, k_cache: Tensor, v_cache: Tensor, N: int) -> ChunkConfig | HopperConfig:
    group = q.shape[1] // k_cache.shape[1]
    rows = triton.cdiv(q.shape[0], max(N, 1)) * group
    if rows >= hopper.TILE_ROWS // 2 and hopper.takes(q, k_cache, v_cache):
        return hopper.config(q.shape[2])
    return config(rows, group, q.shape[2], q.dtype)


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    sinks: Tensor,
    out: Tensor,
    numbers: tuple[float, float, int],
    flags: dict[str, bool],
    scales: CacheScales | None,
    cut: ChunkConfig,
) -> None:
    """Fills `out`. `tables`: block tables, bounds, rows, lengths; `numbers`: scale, softcap, window."""
    T, num_heads, D = q.shape
    HKV, PAGE = k_cache.shape[1:3]
    N, G = tables[2].shape[0], num_heads // HKV
    tiles = T // (cut.block_m // G) + N + 1
    factors = scales or CacheScales(q, q)  # not used without
    chunk_kernel[(tiles * HKV,)](
        q, k_cache, v_cache, *factors, *tables, sinks, out,
        T, N, q.stride(0), tables[0].stride(0), k_cache.stride(0), v_cache.stride(0), factors.keys.stride(0), *numbers,
        HKV=HKV, G=G, D=D, BLOCK_D=triton.next_power_of_2(D), PAGE=PAGE, BLOCK_M=cut.block_m, BLOCK_S=cut.block_s,
        STAGES=cut.stages, SCALED=scales is not None, UPCAST=interpreted(), num_warps=cut.num_warps,
        **flags, **pdl(q.device),
    )  # fmt: skip
