"""Attention of one query per sequence over keys in a paged cache: the specification."""

import torch
from torch import Tensor

from cuformers.kernels.attention_plan import AttentionPlan
from cuformers.kernels.cache_scales import CacheScales, pages_of
from cuformers.kernels.precision import wide


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
) -> Tensor:
    """softmax(scale * q @ K.T) @ V for each sequence, in float32. `plan` and `newest` change no number."""
    del plan, newest
    if lengths.device.type == "cpu":  # a look at the lengths costs nothing here: pages that nobody has are left out
        block_tables = block_tables[:, : -(-max(int(lengths.max()), 1) // k_cache.shape[2])]
    k, v = (_gather(*cache, block_tables) for cache in zip((k_cache, v_cache), scales or (None, None)))
    position = torch.arange(k.shape[1], device=q.device)
    seen = position < lengths[:, None]
    if window is not None:
        seen = seen & (position >= lengths[:, None] - window)
    # A pool position that is not seen may hold anything, NaN included: it is replaced, not multiplied by zero.
    k, v = (x.masked_fill(~seen[:, :, None, None], 0.0) for x in (k, v))
    scores = torch.einsum("nkgd,nskd->nkgs", wide(q).unflatten(1, (k.shape[2], -1)), k).flatten(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    weights = _softmax(scores, sinks).unflatten(1, (k.shape[2], -1))
    out = torch.einsum("nkgs,nskd->nkgd", weights, v).flatten(1, 2)
    return torch.where((lengths > 0)[:, None, None], out, 0.0).to(q.dtype)


def _gather(cache: Tensor, scale: Tensor | None, block_tables: Tensor) -> Tensor:
    """[P, Hkv, page, D] -> [N, M * page, Hkv, D] float32; table entries past a sequence's pages may be anything."""
    pages = block_tables.long().clamp(0, cache.shape[0] - 1)
    return pages_of(cache, scale, pages).transpose(2, 3).flatten(1, 2)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """[N, Hq, S] -> the same; a sink is one more score of its head, whose share of the mass goes nowhere."""
    if sinks is None:
        return scores.softmax(-1).nan_to_num(0.0)
    sink = wide(sinks)[None, :, None].expand(scores.shape[0], -1, 1)
    return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
