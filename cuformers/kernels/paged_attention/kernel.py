"""Decode attention: a program owns one kv head of one item of the plan, that is of one stretch of a row's keys.

The query heads that share the kv head are the rows of a tensor-core tile. Scores are in base 2: exp2 is what the GPU
has.
"""

import triton
import triton.language as tl

from cuformers.kernels import attention_plan
from cuformers.kernels.activation_triton import tanh
from cuformers.kernels.paged_attention.merge_kernel import LOG2E, store_part, store_whole

ALONE = tl.constexpr(attention_plan.ALONE)
NEWEST = tl.constexpr(attention_plan.NEWEST)


@triton.jit
def _pages(table_ptr, start, low, high, PAGE: tl.constexpr, BLOCK_S: tl.constexpr, FRESH: tl.constexpr):
    """Page of a tile that lies in one, else of each of its positions [BLOCK_S]; anything where no key is seen.

    FRESH reads past the first-level cache, which before the wait may hold an earlier step's table.
    """
    CACHE: tl.constexpr = ".cg" if FRESH else ""
    if PAGE >= BLOCK_S:
        # The tile's first position may be hidden (before the window), its page is still there.
        return tl.load(table_ptr + start // PAGE, mask=start < high, other=0, cache_modifier=CACHE)
    else:
        position = start + tl.arange(0, BLOCK_S)
        seen = (position >= low) & (position < high)
        return tl.load(table_ptr + position // PAGE, mask=seen, other=0, cache_modifier=CACHE)


@triton.jit
def _load_tile(
    k_ptr, v_ptr, page, k_page_stride, v_page_stride, start, low, high,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Keys and values [BLOCK_S, BLOCK_D] of positions start.., zero outside [low, high). Pointers are the kv head's."""
    i = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    seen = (start + i >= low) & (start + i < high)
    mask = seen[:, None] if BLOCK_D == D else seen[:, None] & (d < D)[None, :]
    page = page.to(tl.int64)
    if PAGE >= BLOCK_S:
        inside = start % PAGE * D
        k_at = k_ptr + (page * k_page_stride + inside) + (i[:, None] * D + d[None, :])
        v_at = v_ptr + (page * v_page_stride + inside) + (i[:, None] * D + d[None, :])
    else:
        inside = ((start + i) % PAGE * D)[:, None] + d[None, :]
        k_at = k_ptr + (page * k_page_stride)[:, None] + inside
        v_at = v_ptr + (page * v_page_stride)[:, None] + inside
    return tl.load(k_at, mask=mask, other=0.0), tl.load(v_at, mask=mask, other=0.0)


@triton.jit
def _attend(
    q, k, v, acc, m, l, start, low, high, scale, softcap,
    BLOCK_S: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of the running softmax. `scale` carries log2(e) where there is no softcap.

    l [BLOCK_M, BLOCK_S] is summed over its columns at the end only: each sum over a tile's columns is one more meeting
    of all warps.
    """
    if UPCAST:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    position = start + tl.arange(0, BLOCK_S)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:
        s = softcap * LOG2E * tanh(s / softcap)
    s = tl.where(((position >= low) & (position < high))[None, :], s, -float("inf"))
    top = tl.maximum(m, tl.max(s, axis=1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    fade = tl.exp2(m - safe)[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc * fade, input_precision="ieee")
    return acc, top, l * fade + p


@triton.jit
def _early_tile(
    k_ptr, v_ptr, page, k_page_stride, v_page_stride, start, low, high, flags,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first tile, asked for before the wait for the kernel that writes the newest key, which is read after it."""
    # Keys of earlier steps are there already.
    old = tl.where((flags & NEWEST) != 0, high - 1, high) if PDL else high
    k, v = _load_tile(k_ptr, v_ptr, page, k_page_stride, v_page_stride, start, low, old, D, BLOCK_D, PAGE, BLOCK_S)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if (old < high) & (start + BLOCK_S >= high):
            k_new, v_new = _load_tile(
                k_ptr, v_ptr, page, k_page_stride, v_page_stride, start, old, high, D, BLOCK_D, PAGE, BLOCK_S
            )
            is_new = (start + tl.arange(0, BLOCK_S) >= old)[:, None]
            k, v = tl.where(is_new, k_new, k), tl.where(is_new, v_new, v)
    return k, v


@triton.jit(do_not_specialize=["table_stride"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, items_ptr, sinks_ptr, out_ptr, part_ptr, stats_ptr,
    q_stride, table_stride, k_page_stride, v_page_stride, scale, softcap,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [items * HKV]. EARLY: the first tile's keys are asked for before the wait."""
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
    tables_ptr += row * table_stride
    start = low // BLOCK_S * BLOCK_S
    page = _pages(tables_ptr, start, low, high, PAGE, BLOCK_S, True)
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M, BLOCK_S), dtype=tl.float32)
    q_at = q_ptr + row * q_stride + (head * G + g)[:, None] * D + d[None, :]
    q_mask = (g < G)[:, None] & (d < D)[None, :]
    if EARLY:
        k, v = _early_tile(
            k_ptr, v_ptr, page, k_page_stride, v_page_stride, start, low, high, flags, D, BLOCK_D, PAGE, BLOCK_S, PDL
        )
        q = tl.load(q_at, mask=q_mask, other=0.0)
        acc, m, l = _attend(q, k, v, acc, m, l, start, low, high, scale, softcap, BLOCK_S, SOFTCAP, UPCAST)
        start += BLOCK_S
        page = _pages(tables_ptr, start, low, high, PAGE, BLOCK_S, False)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        q = tl.load(q_at, mask=q_mask, other=0.0)
    for at in tl.range(start, high, BLOCK_S, num_stages=STAGES):
        # A tile's page is known one tile ahead, or its keys could not be asked for as early as STAGES allows.
        next_page = _pages(tables_ptr, at + BLOCK_S, low, high, PAGE, BLOCK_S, False)
        k, v = _load_tile(k_ptr, v_ptr, page, k_page_stride, v_page_stride, at, low, high, D, BLOCK_D, PAGE, BLOCK_S)
        acc, m, l = _attend(q, k, v, acc, m, l, at, low, high, scale, softcap, BLOCK_S, SOFTCAP, UPCAST)
        page = next_page
    total = tl.sum(l, axis=1)
    if (flags & ALONE) != 0:
        store_whole(acc, m, total, sinks_ptr, out_ptr, row, head, g, SINKS, HKV * G, G, D)
    else:
        store_part(acc, m, total, part_ptr, stats_ptr, item.to(tl.int64), head, g, HKV * G, G, D)
