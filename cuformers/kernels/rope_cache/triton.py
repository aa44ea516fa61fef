"""Head norms, rotation and cache write in one launch; queries and keys are overwritten in place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels.cache_scales import FP8, CacheScales
from cuformers.kernels.cache_scales_triton import head_scale, inverse, to_fp8
from cuformers.kernels.launch import interpreted, pdl
from cuformers.kernels.norm_args import Norm

FEW_TOKENS = 32
"""Up to this many tokens every head is a program of its own, for the shortest time; above, programs take more heads."""
MANY_HEADS = 8


@triton.jit
def _norm_weight(q_ptr, k_ptr, offset, is_q, col, inside, NORM: tl.constexpr):
    """offset + weight of each head's norm: [HEADS, columns] float32. NORM says for which of q and k there is one."""
    is_q = is_q[:, None]
    here = inside[None, :]
    col = col[None, :]
    if NORM == "q":
        q = tl.load(q_ptr + col, mask=is_q & here, other=0.0).to(tl.float32)
        return offset + q
    elif NORM == "k":
        k = tl.load(k_ptr + col, mask=(~is_q) & here, other=0.0).to(tl.float32)
        return offset + k
    else:
        q = tl.load(q_ptr + col, mask=is_q & here, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + col, mask=(~is_q) & here, other=0.0).to(tl.float32)
        return offset + tl.where(is_q, q, k)


@triton.jit
def _rope_cache_kernel(
    qkv_ptr, cos_ptr, sin_ptr, rows_ptr, q_norm_ptr, k_norm_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    k_scales_ptr, v_scales_ptr,
    num_heads, num_kv_heads, eps_q, eps_k, offset_q, offset_k, k_page_stride, v_page_stride, scales_page_stride,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, CACHE: tl.constexpr, SCALED: tl.constexpr,
    EMULATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program owns HEADS heads of one token. A head is cut in three: both halves of its pairs, and the rest."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    total = num_heads + 2 * num_kv_heads
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = head < num_heads
    is_v = head >= num_heads + num_kv_heads
    exists = head < total
    i = tl.arange(0, BLOCK_HALF)
    j = 2 * HALF + tl.arange(0, BLOCK_REST)
    in_half, in_rest = i < HALF, j < D
    if ROTATE:
        at_row = tl.load(rows_ptr + token, cache_modifier=".cg").to(tl.int64) * HALF + i
        cos = tl.load(cos_ptr + at_row, mask=in_half, other=0.0)[None, :]
        sin = tl.load(sin_ptr + at_row, mask=in_half, other=0.0)[None, :]
    if CACHE:
        slot = tl.load(slots_ptr + token, cache_modifier=".cg").to(tl.int64)
    if NORM != "none":
        offset = tl.where(is_q, offset_q, offset_k)[:, None]
        eps = tl.where(is_q, eps_q, eps_k)
        weight_a = _norm_weight(q_norm_ptr, k_norm_ptr, offset, is_q, i, in_half, NORM)
        weight_b = _norm_weight(q_norm_ptr, k_norm_ptr, offset, is_q, i + HALF, in_half, NORM)
        weight_c = _norm_weight(q_norm_ptr, k_norm_ptr, offset, is_q, j, in_rest, NORM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    base = qkv_ptr + token * total * D + head[:, None] * D
    mask_half = exists[:, None] & in_half[None, :]
    mask_rest = exists[:, None] & in_rest[None, :]
    raw_a = tl.load(base + i[None, :], mask=mask_half, other=0.0)
    raw_b = tl.load(base + HALF + i[None, :], mask=mask_half, other=0.0)
    raw_c = tl.load(base + j[None, :], mask=mask_rest, other=0.0)
    a, b, c = raw_a.to(tl.float32), raw_b.to(tl.float32), raw_c.to(tl.float32)
    if NORM != "none":
        square = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
        normed = (is_q & (NORM != "k")) | ((~is_q) & (NORM != "q"))
        rstd = tl.where(normed, tl.rsqrt(square / D + eps), 1.0)[:, None]
        a = a * rstd * tl.where(normed[:, None], weight_a, 1.0)
        b = b * rstd * tl.where(normed[:, None], weight_b, 1.0)
        c = c * rstd * tl.where(normed[:, None], weight_c, 1.0)
    if ROTATE:
        a, b = a * cos - b * sin, b * cos + a * sin
    out = raw_a.dtype
    # Values pass through as they are.
    a = tl.where(is_v[:, None], raw_a, a.to(out))
    b = tl.where(is_v[:, None], raw_b, b.to(out))
    c = tl.where(is_v[:, None], raw_c, c.to(out))
    if NORM != "none" or ROTATE:
        changed = (~is_v)[:, None]
        tl.store(base + i[None, :], a, mask=mask_half & changed)
        tl.store(base + HALF + i[None, :], b, mask=mask_half & changed)
        if NORM != "none":
            tl.store(base + j[None, :], c, mask=mask_rest & changed)
    if CACHE:
        kept = exists & (~is_q) & (slot >= 0)
        kv_head = tl.where(is_v, head - num_heads - num_kv_heads, head - num_heads)
        within = (kv_head * PAGE + slot % PAGE) * D
        page = slot // PAGE
        if SCALED:
            a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
            scale = head_scale(a, b, c)
            shrink = inverse(scale)[:, None]
            a, b, c = to_fp8(a * shrink, EMULATED), to_fp8(b * shrink, EMULATED), to_fp8(c * shrink, EMULATED)
            scales_ptr = tl.where(is_v, v_scales_ptr, k_scales_ptr) + page * scales_page_stride
            tl.store(scales_ptr + kv_head * PAGE + slot % PAGE, scale, mask=kept)
        at = tl.where(is_v, v_cache_ptr + page * v_page_stride + within, k_cache_ptr + page * k_page_stride + within)
        at = at[:, None]
        tl.store(at + i[None, :], a, mask=kept[:, None] & in_half[None, :])
        tl.store(at + HALF + i[None, :], b, mask=kept[:, None] & in_half[None, :])
        tl.store(at + j[None, :], c, mask=kept[:, None] & in_rest[None, :])


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
    per_program: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the package. The results are views of qkv. `per_program` overrides how many heads a program takes: the order
    in which a head's squares are added follows from it."""
    qkv = qkv.detach().contiguous()
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, head_dim))
    if qkv.shape[0]:
        per_program = per_program or (1 if len(heads) <= FEW_TOKENS else MANY_HEADS)
        tables, norms, cache = (cos, sin, rows), (q_norm, k_norm), (k_cache, v_cache, slots, scales)
        _launch(heads, *tables, num_heads, num_kv_heads, *norms, *cache, per_program)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


def _launch(
    heads: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rows: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Norm | None,
    k_norm: Norm | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slots: Tensor | None,
    scales: CacheScales | None,
    per_program: int,
) -> None:
    tokens, total, D = heads.shape
    half = cos.shape[-1] if cos is not None else D // 2
    if k_cache is None:
        total -= num_kv_heads  # values have no work
    norm = ("q" if q_norm else "") + ("k" if k_norm else "") or "none"
    # A pointer that is not used is any tensor.
    none = Norm(heads, 0.0, 0.0)
    qn, kn = q_norm or none, k_norm or none
    caches = (heads, heads, rows) if k_cache is None else (k_cache, v_cache, slots)
    factors_of = scales or CacheScales(heads, heads)
    strides = (0, 0) if k_cache is None or v_cache is None else (k_cache.stride(0), v_cache.stride(0))
    dtype = heads.dtype if scales is None else FP8
    for cache in (k_cache, v_cache):
        inner = cache is None or cache[0].is_contiguous()
        assert inner and (cache is None or cache.dtype == dtype), f"pages are contiguous, in {dtype}"
    for factors in (cos, sin):
        good = factors is None or (factors.dtype == torch.float32 and factors.is_contiguous())
        assert good, "rotary factors are contiguous float32"
    _rope_cache_kernel[(tokens, triton.cdiv(total, per_program))](
        heads, heads if cos is None else cos, heads if sin is None else sin, rows, qn.weight.detach(),
        kn.weight.detach(), *caches, *factors_of, num_heads, num_kv_heads, float(qn.eps), float(kn.eps),
        float(qn.offset), float(kn.offset), *strides, factors_of.keys.stride(0),
        D=D, HALF=half, BLOCK_HALF=max(16, triton.next_power_of_2(half)),
        BLOCK_REST=triton.next_power_of_2(max(1, D - 2 * half)), PAGE=1 if k_cache is None else k_cache.shape[2],
        HEADS=per_program, NORM=norm, ROTATE=cos is not None, CACHE=k_cache is not None,
        SCALED=scales is not None, EMULATED=interpreted(), num_warps=1 if per_program == 1 else 4, **pdl(heads.device),
    )  # fmt: skip
