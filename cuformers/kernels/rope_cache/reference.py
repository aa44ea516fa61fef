"""What happens between the qkv product and attention: head norms, rotation, cache write. The specification."""

import torch
from torch import Tensor

from cuformers.kernels.cache_scales import FP8, CacheScales, bytes_of, quantized
from cuformers.kernels.norm.reference import rms_norm
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.precision import wide


def rope_cache(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rows: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slots: Tensor | None = None,
    scales: CacheScales | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [T, heads, D] of the stream; keys and values are also written to their slots."""
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q, k = (_norm_and_rotate(x, norm, cos, sin, rows) for x, norm in ((q, q_norm), (k, k_norm)))
    if k_cache is not None:
        assert v_cache is not None and slots is not None, "a cache is keys, values and slots"
        for x, cache, scale in zip((k, v), (k_cache, v_cache), scales or (None, None)):
            if scale is not None:
                x, factors = quantized(x.detach())
                _write(scale, factors, slots)
            _write(cache, x, slots)
    return q, k, v


def _norm_and_rotate(x: Tensor, norm: Norm | None, cos: Tensor | None, sin: Tensor | None, rows: Tensor) -> Tensor:
    """[T, heads, D] -> the same; float32 inside, rounded once."""
    h = wide(x)
    if norm is not None:
        h = rms_norm(h, *norm)
    if cos is not None and sin is not None:
        h = rotate(h, wide(cos)[rows.long(), None], wide(sin)[rows.long(), None])
    return h.to(x.dtype)


def rotate(h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs are (i, i + rot/2), "rotate_half"; dims from rot on pass through. cos, sin: [T, 1, rot / 2]."""
    half = cos.shape[-1]
    a, b, rest = h.split((half, half, h.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _write(cache: Tensor, x: Tensor, slots: Tensor) -> None:
    """Writes x [T, Hkv, ...] at its slots of [P, Hkv, page, ...]; without asking the device whether any is negative.

    A token without a slot repeats the first token that has one, so that every duplicate writes the same value.
    """
    valid = slots >= 0
    source = torch.where(valid, torch.arange(len(slots), device=slots.device), valid.int().argmax())
    target = slots[source].long().clamp(min=0)
    page, offset = target // cache.shape[2], target % cache.shape[2]
    if cache.dtype == x.dtype == FP8:
        cache, x = bytes_of(cache), bytes_of(x)
    new = torch.where(valid.any(), x.detach()[source].to(cache.dtype), cache[page, :, offset])
    cache[page, :, offset] = new
