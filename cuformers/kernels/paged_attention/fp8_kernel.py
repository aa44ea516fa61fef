"""Decode attention over fp8 pages, the same walk as in `kernel`, in float16.

Pages are read as pairs of numbers, 16 bits, which is the unit in which shared memory turns a tile around for the tensor
cores. Even and odd columns are then matrices of their own: a score is the sum of two products, an output two of them
side by side. Float16 holds every fp8 number, and is one instruction away from it, which bfloat16 is not.
"""

import triton
import triton.language as tl

from cuformers.kernels import attention_plan
from cuformers.kernels.activation_triton import tanh
from cuformers.kernels.cache_scales_triton import exponent, inverse, load_scales, normalized, unpacked
from cuformers.kernels.paged_attention.kernel import _load_tile, _pages
from cuformers.kernels.paged_attention.merge_kernel import LOG2E, store_part, store_whole

ALONE = tl.constexpr(attention_plan.ALONE)
NEWEST = tl.constexpr(attention_plan.NEWEST)


@triton.jit
def _attend(
    q_even, q_odd, k, v, k_scale, v_scale, even, odd, m, l, start, low, high, scale, softcap,
    BLOCK_S: tl.constexpr, SOFTCAP: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """One tile of the running softmax. `scale` carries log2(e) where there is no softcap.

    A value's factor joins the score, and leaves the sum of the weights again: p is the weight times the value's size,
    over the largest of these, so that in float16 it neither overflows nor vanishes.
    """
    dtype: tl.constexpr = q_even.dtype
    k_even, k_odd = unpacked(k, EMULATED)
    v_even, v_odd = unpacked(v, EMULATED)
    s = tl.dot(q_even, tl.trans(k_even.to(dtype)), input_precision="ieee")
    s = tl.dot(q_odd, tl.trans(k_odd.to(dtype)), s, input_precision="ieee")
    s = s * (k_scale * scale)[None, :]
    if SOFTCAP:
        s = softcap * LOG2E * tanh(s / softcap)
    s += exponent(v_scale)[None, :]
    position = start + tl.arange(0, BLOCK_S)
    s = tl.where(((position >= low) & (position < high))[None, :], s, -float("inf"))
    top = tl.maximum(m, tl.max(s, axis=1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    fade = tl.exp2(m - safe)[:, None]
    weights = p.to(dtype)
    even = tl.dot(weights, v_even.to(dtype), even * fade, input_precision="ieee")
    odd = tl.dot(weights, v_odd.to(dtype), odd * fade, input_precision="ieee")
    return even, odd, top, l * fade + p * inverse(v_scale)[None, :]


@triton.jit
def _load(
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, page, k_page_stride, v_page_stride, scales_page_stride, start, low, high,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Keys, values and their factors of positions start.., zero and one outside [low, high); D counts pairs."""
    k, v = _load_tile(k_ptr, v_ptr, page, k_page_stride, v_page_stride, start, low, high, D, BLOCK_D, PAGE, BLOCK_S)
    k_scale, v_scale = load_scales(
        k_scales_ptr, v_scales_ptr, page, scales_page_stride, start, low, high, PAGE, BLOCK_S
    )
    return k, v, k_scale, v_scale


@triton.jit
def _early_tile(
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, page, k_page_stride, v_page_stride, scales_page_stride, start, low, high,
    flags,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first tile, asked for before the wait for the kernel that writes the newest key, which is read after it."""
    old = tl.where((flags & NEWEST) != 0, high - 1, high) if PDL else high
    k, v, k_scale, v_scale = _load(
        k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, page, k_page_stride, v_page_stride, scales_page_stride,
        start, low, old, D, BLOCK_D, PAGE, BLOCK_S,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        if (old < high) & (start + BLOCK_S >= high):
            k_new, v_new, k_scale_new, v_scale_new = _load(
                k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, page, k_page_stride, v_page_stride, scales_page_stride,
                start, old, high, D, BLOCK_D, PAGE, BLOCK_S,
            )  # fmt: skip
            is_new = start + tl.arange(0, BLOCK_S) >= old
            k, v = tl.where(is_new[:, None], k_new, k), tl.where(is_new[:, None], v_new, v)
            k_scale, v_scale = tl.where(is_new, k_scale_new, k_scale), tl.where(is_new, v_scale_new, v_scale)
    return k, v, k_scale, v_scale


@triton.jit
def _load_queries(q_ptr, row, q_stride, head, G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_D: tl.constexpr, EMULATED: tl.constexpr):  # fmt: skip
    """Even and odd columns of the queries [BLOCK_M, BLOCK_D], and what they are to be multiplied by; D counts pairs."""
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    at = q_ptr + row * q_stride + (head * G + g)[:, None] * (2 * D) + 2 * d[None, :]
    mask = (g < G)[:, None] & (d < D)[None, :]
    return normalized(tl.load(at, mask=mask, other=0.0), tl.load(at + 1, mask=mask, other=0.0), EMULATED)


@triton.jit(do_not_specialize=["table_stride"])
def fp8_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, items_ptr, sinks_ptr, out_ptr, part_ptr, stats_ptr,
    q_stride, table_stride, k_page_stride, v_page_stride, scales_page_stride, scale, softcap,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, EMULATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [items * HKV]. D and BLOCK_D count pairs, as do the strides of pages. EARLY: as in `attention_kernel`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    item = tl.program_id(0) // HKV
    head = tl.program_id(0) % HKV
    row = tl.load(items_ptr + item * 4, cache_modifier=".cg").to(tl.int64)
    low = tl.load(items_ptr + item * 4 + 1, cache_modifier=".cg")
    high = tl.load(items_ptr + item * 4 + 2, cache_modifier=".cg")
    flags = tl.load(items_ptr + item * 4 + 3, cache_modifier=".cg")
    # Item 0 is always there and waits for this kernel's predecessor, so that the kernel never ends before that one.
    if row < 0:
        return
    k_ptr += head * PAGE * D
    v_ptr += head * PAGE * D
    k_scales_ptr += head * PAGE
    v_scales_ptr += head * PAGE
    tables_ptr += row * table_stride
    start = low // BLOCK_S * BLOCK_S
    page = _pages(tables_ptr, start, low, high, PAGE, BLOCK_S, True)
    even = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    odd = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M, BLOCK_S), dtype=tl.float32)
    if EARLY:
        k, v, k_scale, v_scale = _early_tile(
            k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, page, k_page_stride, v_page_stride, scales_page_stride,
            start, low, high, flags, D, BLOCK_D, PAGE, BLOCK_S, PDL,
        )  # fmt: skip
        q_even, q_odd, size = _load_queries(q_ptr, row, q_stride, head, G, D, BLOCK_M, BLOCK_D, EMULATED)
        scale *= size
        even, odd, m, l = _attend(
            q_even, q_odd, k, v, k_scale, v_scale, even, odd, m, l, start, low, high, scale, softcap,
            BLOCK_S, SOFTCAP, EMULATED,
        )  # fmt: skip
        start += BLOCK_S
        page = _pages(tables_ptr, start, low, high, PAGE, BLOCK_S, False)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        q_even, q_odd, size = _load_queries(q_ptr, row, q_stride, head, G, D, BLOCK_M, BLOCK_D, EMULATED)
        scale *= size
    for at in tl.range(start, high, BLOCK_S, num_stages=STAGES):
        # A tile's page is known one tile ahead, or its keys could not be asked for as early as STAGES allows.
        next_page = _pages(tables_ptr, at + BLOCK_S, low, high, PAGE, BLOCK_S, False)
        k, v, k_scale, v_scale = _load(
            k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, page, k_page_stride, v_page_stride, scales_page_stride,
            at, low, high, D, BLOCK_D, PAGE, BLOCK_S,
        )  # fmt: skip
        even, odd, m, l = _attend(
            q_even, q_odd, k, v, k_scale, v_scale, even, odd, m, l, at, low, high, scale, softcap,
            BLOCK_S, SOFTCAP, EMULATED,
        )  # fmt: skip
        page = next_page
    g = tl.arange(0, BLOCK_M)
    acc, total = tl.interleave(even, odd), tl.sum(l, axis=1)
    if (flags & ALONE) != 0:
        store_whole(acc, m, total, sinks_ptr, out_ptr, row, head, g, SINKS, HKV * G, G, 2 * D)
    else:
        store_part(acc, m, total, part_ptr, stats_ptr, item.to(tl.int64), head, g, HKV * G, G, 2 * D)
