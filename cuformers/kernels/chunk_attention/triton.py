"""Attention of chunks over the paged cache: how work is cut, and the launch."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.kernels.chunk_attention.kernel import chunk_kernel
from cuformers.kernels.launch import interpreted, pdl

LOG2E = 1.4426950408889634
MAX_ROWS = 128


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
    most = MAX_ROWS if dtype.itemsize == 2 and head_dim <= 128 else MAX_ROWS // 2
    block_m = min(max(16, triton.next_power_of_2(rows)), most)
    block_m = max(block_m, triton.next_power_of_2(group))
    block_s = 64 if dtype.itemsize == 2 and head_dim <= 128 else 32
    return ChunkConfig(block_m, block_s, 8 if block_m >= 128 else 4, 2)


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
    cut: ChunkConfig | None = None,
) -> Tensor:
    """See the package. `cut` overrides the rule, for tuning."""
    q = _checked(q.detach(), k_cache, v_cache)
    T, num_heads = q.shape[:2]
    HKV, PAGE, D = k_cache.shape[1:]
    N, G = rows.shape[0], num_heads // HKV
    out = torch.empty((T, num_heads, D), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    cut = cut or config(triton.cdiv(T, max(N, 1)) * G, G, D, q.dtype)
    tiles = T // (cut.block_m // G) + N + 1
    chunk_kernel[(tiles * HKV,)](
        q, k_cache, v_cache, block_tables, bounds, rows, lengths, q if sinks is None else sinks.detach(), out,
        T, N, q.stride(0), block_tables.stride(0), k_cache.stride(0), v_cache.stride(0),
        float(scale * LOG2E) if softcap is None else float(scale), float(softcap or 0.0), window or 0,
        HKV=HKV, G=G, D=D, BLOCK_D=triton.next_power_of_2(D), PAGE=PAGE, BLOCK_M=cut.block_m, BLOCK_S=cut.block_s,
        STAGES=cut.stages, WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        UPCAST=interpreted(), num_warps=cut.num_warps, **pdl(q.device),
    )  # fmt: skip
    return out


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
