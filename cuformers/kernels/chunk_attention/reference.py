"""Attention of chunks of queries over keys in a paged cache: the specification."""

from itertools import pairwise

import torch
from torch import Tensor

from cuformers.kernels.cache_scales import CacheScales, pages_of
from cuformers.kernels.precision import wide

BLOCK = 256
"""Queries that are looked at together: scores of a long chunk would not fit, and half of them are hidden."""


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
) -> Tensor:
    """softmax(scale * q @ K.T) @ V for each query over the keys it sees, in float32. Reads the bounds on the host."""
    ends, outs = bounds.tolist(), []
    for (begin, end), row, length in zip(pairwise(ends), rows.tolist(), lengths.tolist()):
        if begin == end:
            continue
        pages = block_tables[row, : -(-length // k_cache.shape[2])].long()
        k, v = (_gather(*cache, pages)[:length] for cache in zip((k_cache, v_cache), scales or (None, None)))
        for at in range(begin, end, BLOCK):
            block = wide(q[at : min(at + BLOCK, end)])
            outs.append(_attend(block, k, v, length - end + at, scale, window, softcap, sinks))
    padding = q.new_zeros(q.shape[0] - ends[-1], *q.shape[1:])
    return torch.cat([out.to(q.dtype) for out in outs] + [padding])


def _gather(cache: Tensor, scale: Tensor | None, pages: Tensor) -> Tensor:
    """[P, Hkv, page, D] -> [pages * page, Hkv, D] float32."""
    return pages_of(cache, scale, pages).transpose(1, 2).flatten(0, 1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[C, Hq, D] queries at positions first.., over keys and values [S, Hkv, D] at positions 0... -> [C, Hq, D]"""
    low, high = 0 if window is None else max(0, first - window + 1), first + q.shape[0]
    k, v = k[low:high], v[low:high]
    own = torch.arange(first, high, device=q.device)[:, None]
    position = torch.arange(low, high, device=q.device)
    seen = position <= own
    if window is not None:
        seen = seen & (position > own - window)
    scores = torch.einsum("qkgd,skd->kgqs", q.unflatten(1, (k.shape[1], -1)), k).flatten(0, 1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, wide(sinks)[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : high - low].unflatten(0, (k.shape[1], -1))
    return torch.einsum("kgqs,skd->qkgd", weights, v).flatten(1, 2)
