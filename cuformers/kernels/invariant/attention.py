"""Every attention as `chunk_attention` with one walk over the keys, so that a query's bits do not tell who asked.

A query walks its keys tile by tile from position 0 on, and no walk is split. A decoding row is a chunk of one query.
Tiles that a query sees nothing of leave its sums as they are, so the queries that share its tile do not matter.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.cuda.device import capability
from cuformers.kernels.chunk_attention import triton as chunks
from cuformers.kernels.chunk_attention.triton import ChunkConfig
from cuformers.kernels.invariant.rope import rope_cache
from cuformers.kernels.norm_args import Norm

FEW_ROWS, MANY_ROWS = 64, 128
"""Rows of a tile: (query, head) pairs."""
TWO_TILES = (9, 0)
"""Capability where both are tensor-core tiles of the same layout, in which a warp holds whole rows of scores: their
maxima and sums are then taken in one order. Smaller tiles, and elsewhere other sizes, spread a row over warps."""


class OneQueryEach(NamedTuple):
    """The plan of decoding rows: chunk n is query n and row n of the block tables."""

    bounds: Tensor
    """[N + 1], int32."""
    rows: Tensor
    """[N], int32."""


def cut(
    T: int, N: int, group: int, head_dim: int, dtype: torch.dtype, on: tuple[int, int] | None
) -> ChunkConfig:
    """How N chunks of T queries together are cut on a GPU of capability `on`; tiles of keys follow from the model.

    Example:
        >>> [cut(T, 1, 4, 128, torch.bfloat16, (9, 0)).block_m for T in (1, 4096)]
        [64, 128]
    """
    few = on == TWO_TILES and dtype.itemsize == 2 and T * group <= FEW_ROWS * N
    return chunks.config(FEW_ROWS if few else MANY_ROWS, group, head_dim, dtype)


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
) -> Tensor:
    """See the op's package."""
    T, num_heads, head_dim = q.shape
    one = cut(T, max(len(rows), 1), num_heads // k_cache.shape[1], head_dim, q.dtype, capability(q.device))
    attend = partial(chunks.chunk_attention, scale=scale, window=window, softcap=softcap, sinks=sinks, cut=one)
    return attend(q, k_cache, v_cache, block_tables, bounds, rows, lengths)


def attention_plan(lengths: Tensor, *, num_kv_heads: int, window: int | None = None) -> OneQueryEach:
    """Nothing is split, so nothing is planned."""
    del num_kv_heads, window
    bounds = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    return OneQueryEach(bounds, bounds[:-1])


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
    plan: OneQueryEach | None = None,
    newest: int = 1,
) -> Tensor:
    """See the op's package. However many keys are new, none is read before the kernels before have finished."""
    del newest
    plan = plan or attention_plan(lengths, num_kv_heads=k_cache.shape[1])
    attend = partial(chunk_attention, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return attend(q, k_cache, v_cache, block_tables, plan.bounds, plan.rows, lengths)


def decode_attention(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    scale: float,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    plan: OneQueryEach | None = None,
    newest: int = 1,
) -> Tensor:
    """See the op's package."""
    q, _, _ = rope_cache(
        qkv,
        cos,
        sin,
        rows,
        num_heads=num_heads,
        num_kv_heads=k_cache.shape[1],
        head_dim=k_cache.shape[3],
        q_norm=q_norm,
        k_norm=k_norm,
        k_cache=k_cache,
        v_cache=v_cache,
        slots=slots,
    )
    attend = partial(paged_attention, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return attend(q, k_cache, v_cache, block_tables, lengths, plan=plan, newest=newest)
