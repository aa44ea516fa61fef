"""Decode attention: a program owns one kv head of one sequence and one stretch of its keys ("split").

The query heads that share the kv head are the rows of a tensor-core tile. Scores are in base 2: exp2 is what the GPU
has.
"""

import triton
import triton.language as tl

from cuformers.kernels.activation_triton import tanh
from cuformers.kernels.paged_attention.merge_kernel import LOG2E, merge_pair, store_part, store_whole, stretch


@triton.jit
def _tile_pages(table_ptr, start, low, high, PAGE: tl.constexpr, BLOCK_S: tl.constexpr, FRESH: tl.constexpr):
    """Page of each position of a tile: [BLOCK_S] int64. FRESH reads past the first-level cache."""
    CACHE: tl.constexpr = ".cg" if FRESH else ""
    position = start + tl.arange(0, BLOCK_S)
    if PAGE >= BLOCK_S:
        # The tile lies in one page. Its first position may be hidden (before the window), its page is still there.
        some = (start + BLOCK_S > low) & (start < high)
        page = tl.load(table_ptr + start // PAGE, mask=some, other=0, cache_modifier=CACHE)
        return page.to(tl.int64) + tl.zeros((BLOCK_S,), dtype=tl.int64)
    else:
        seen = (position >= low) & (position < high)
        return tl.load(table_ptr + position // PAGE, mask=seen, other=0, cache_modifier=CACHE).to(tl.int64)


@triton.jit
def _load_tile(
    k_ptr, v_ptr, page, k_page_stride, v_page_stride, start, low, high,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Keys and values [BLOCK_S, BLOCK_D] of positions start.., zero outside [low, high). Pointers are the kv head's."""
    position = start + tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    seen = (position >= low) & (position < high)
    if PAGE >= BLOCK_S:
        offset = start % PAGE + tl.arange(0, BLOCK_S)
    else:
        offset = position % PAGE
    within = offset[:, None] * D + d[None, :]
    mask = seen[:, None] if BLOCK_D == D else seen[:, None] & (d < D)[None, :]
    k = tl.load(k_ptr + (page * k_page_stride)[:, None] + within, mask=mask, other=0.0)
    v = tl.load(v_ptr + (page * v_page_stride)[:, None] + within, mask=mask, other=0.0)
    return k, v


@triton.jit
def _capped(s, softcap, SOFTCAP: tl.constexpr):
    """Scores in base 2."""
    if SOFTCAP:
        return softcap * LOG2E * tanh(s / softcap)
    else:
        return s


@triton.jit
def _attend(
    q, k, v, acc, m, l, start, low, high, scale, softcap,
    BLOCK_S: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of the running softmax. `scale` carries log2(e) where there is no softcap."""
    if UPCAST:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    position = start + tl.arange(0, BLOCK_S)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = _capped(s, softcap, SOFTCAP)
    s = tl.where(((position >= low) & (position < high))[None, :], s, -float("inf"))
    top = tl.maximum(m, tl.max(s, axis=1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    fade = tl.exp2(m - safe)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, top, l * fade + tl.sum(p, axis=1)


@triton.jit(do_not_specialize=["window", "fresh", "table_stride"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, lengths_ptr, sinks_ptr, out_ptr, part_ptr, stats_ptr, counters_ptr,
    q_stride, table_stride, k_page_stride, v_page_stride, scale, softcap, window, fresh,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, MERGE: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [N * HKV, SPLITS]. MERGE: partial results are merged "here" (counters) or "later" (merge_kernel)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    n, head = pair // HKV, pair % HKV
    length = tl.load(lengths_ptr + n, cache_modifier=".cg")
    first, start, per_split, active = stretch(length, window, SPLITS, BLOCK_S, LEAST, WINDOW)
    begin = start + split * per_split
    end = tl.minimum(begin + per_split, length)
    if (begin >= end) & (split > 0):
        return
    k_ptr += head * PAGE * D
    v_ptr += head * PAGE * D
    tables_ptr += n * table_stride
    # Keys of earlier steps are there already; those of this step only after the wait.
    old = tl.minimum(end, length - fresh)
    page = _tile_pages(tables_ptr, begin, first, end, PAGE, BLOCK_S, True)
    here = old if PDL else end
    k, v = _load_tile(k_ptr, v_ptr, page, k_page_stride, v_page_stride, begin, first, here, D, BLOCK_D, PAGE, BLOCK_S)
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if begin + BLOCK_S > old:
            low = tl.maximum(first, old)
            k_new, v_new = _load_tile(
                k_ptr, v_ptr, page, k_page_stride, v_page_stride, begin, low, end, D, BLOCK_D, PAGE, BLOCK_S
            )
            is_new = (begin + tl.arange(0, BLOCK_S) >= low)[:, None]
            k, v = tl.where(is_new, k_new, k), tl.where(is_new, v_new, v)
    q_at = q_ptr + n * q_stride + (head * G + g)[:, None] * D + d[None, :]
    q = tl.load(q_at, mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)
    acc, m, l = _attend(q, k, v, acc, m, l, begin, first, end, scale, softcap, BLOCK_S, SOFTCAP, UPCAST)
    for at in tl.range(begin + BLOCK_S, end, BLOCK_S, num_stages=STAGES):
        page = _tile_pages(tables_ptr, at, first, end, PAGE, BLOCK_S, False)
        k, v = _load_tile(k_ptr, v_ptr, page, k_page_stride, v_page_stride, at, first, end, D, BLOCK_D, PAGE, BLOCK_S)
        acc, m, l = _attend(q, k, v, acc, m, l, at, first, end, scale, softcap, BLOCK_S, SOFTCAP, UPCAST)
    if SPLITS == 1:
        store_whole(acc, m, l, sinks_ptr, out_ptr, pair, head, g, SINKS, D, G)
    elif MERGE == "later":
        store_part(acc, m, l, part_ptr, stats_ptr, pair * SPLITS + split, g, D, G)
    elif active <= 1:
        store_whole(acc, m, l, sinks_ptr, out_ptr, pair, head, g, SINKS, D, G)
    else:
        store_part(acc, m, l, part_ptr, stats_ptr, pair * SPLITS + split, g, D, G)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel")
        if arrived == active - 1:
            merge_pair(
                part_ptr, stats_ptr, sinks_ptr, out_ptr, pair, head, active, G, D, BLOCK_D, SPLITS, SINKS
            )  # fmt: skip
            tl.store(counters_ptr + pair, 0)
