"""Attention of chunks: a program owns one kv head and a tile of queries of one chunk.

The rows of a tile are (query, query head of the kv head's group), so that keys are loaded once for the group. Scores
are in base 2: exp2 is what the GPU has.
"""

import triton
import triton.language as tl

from cuformers.kernels.activation_triton import tanh
from cuformers.kernels.cache_scales_triton import exponent, inverse, load_scales, normalized
from cuformers.kernels.paged_attention.merge_kernel import LOG2E


@triton.jit
def _chunk_of_tile(bounds_ptr, N, tile, BLOCK_Q: tl.constexpr):
    """(chunk, its first tile): chunk n starts at tile bounds[n] // BLOCK_Q + n, which leaves room for all before it.

    What follows the last chunk is a chunk too, number N: the padding.
    """
    n = tl.zeros((), dtype=tl.int32) - 1
    for at in range(0, N + 1, 128):
        i = at + tl.arange(0, 128)
        bound = tl.load(bounds_ptr + i, mask=i <= N, other=0, cache_modifier=".cg")
        n += tl.sum(((i <= N) & (bound // BLOCK_Q + i <= tile)).to(tl.int32), axis=0)
    return n, tl.load(bounds_ptr + n, cache_modifier=".cg") // BLOCK_Q + n


@triton.jit
def _visible(first, last, length, window, BLOCK_S: tl.constexpr, WINDOW: tl.constexpr):
    """Keys of queries at positions first..last: (lowest, start of tiles, start and end of full tiles, end).

    Every query sees all of a full tile. Before the full ones are tiles on the window's edge, after them those on the
    diagonal.
    """
    end = tl.maximum(tl.minimum(last + 1, length), 0)
    full_end = tl.minimum(tl.maximum(first + 1, 0), end) // BLOCK_S * BLOCK_S
    if WINDOW:
        low = tl.maximum(first + 1 - window, 0)
        start = low // BLOCK_S * BLOCK_S
        full = tl.cdiv(tl.maximum(last + 1 - window, 0), BLOCK_S) * BLOCK_S
        return low, start, tl.minimum(tl.maximum(full, start), full_end), full_end, end
    else:
        return 0, 0, 0, full_end, end


@triton.jit
def _tile_pages(table_ptr, start, low, end, PAGE: tl.constexpr, BLOCK_S: tl.constexpr, MASK: tl.constexpr):
    """Page of a tile, or of each position [BLOCK_S] where a tile is longer than a page; int64."""
    if PAGE >= BLOCK_S:
        return tl.load(table_ptr + start // PAGE).to(tl.int64)
    else:
        position = start + tl.arange(0, BLOCK_S)
        if MASK:
            seen = (position >= low) & (position < end)
            return tl.load(table_ptr + position // PAGE, mask=seen, other=0).to(tl.int64)
        else:
            return tl.load(table_ptr + position // PAGE).to(tl.int64)


@triton.jit
def _load_tile(
    ptr, page, page_stride, start, low, end,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_S: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Keys or values [BLOCK_S, BLOCK_D] of positions start.., zero outside [low, end). The pointer is the kv head's."""
    offset = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    if PAGE >= BLOCK_S:
        at = ptr + page * page_stride + start % PAGE * D + (offset[:, None] * D + d[None, :])
    else:
        at = ptr + (page * page_stride)[:, None] + ((offset % PAGE)[:, None] * D + d[None, :])
    if MASK:
        seen = ((start + offset >= low) & (start + offset < end))[:, None]
        return tl.load(at, mask=seen if BLOCK_D == D else seen & (d < D)[None, :], other=0.0)
    elif BLOCK_D == D:
        return tl.load(at)
    else:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _attend(
    q, k, v, k_scale, v_scale, acc, m, l, own, start, window, scale, softcap,
    BLOCK_S: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr, MASK: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of the running softmax of queries at positions `own` [BLOCK_M].

    `scale` carries log2(e) where there is no softcap. A value's factor joins the score, as in `paged_attention`.
    """
    if SCALED:
        k, v = k.to(q.dtype), v.to(q.dtype)
    if UPCAST:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SCALED:
        s *= k_scale[None, :]
    if SOFTCAP:
        s = tanh(s * (scale / softcap))
        scale = softcap * LOG2E
    if SCALED:
        s = s * scale + exponent(v_scale)[None, :]
        scale = 1.0
    if MASK:
        position = start + tl.arange(0, BLOCK_S)
        seen = position[None, :] <= own[:, None]
        if WINDOW:
            seen = seen & (position[None, :] > own[:, None] - window)
        s = tl.where(seen, s, -float("inf"))
    top = tl.maximum(m, tl.max(s, axis=1) * scale)
    # A row may have seen nothing yet, but not after a full tile.
    safe = tl.where(top == -float("inf"), 0.0, top) if MASK else top
    p = tl.exp2(s * scale - safe[:, None])
    fade = tl.exp2(m - safe)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, top, l * fade + tl.sum(p * inverse(v_scale)[None, :] if SCALED else p, axis=1)


@triton.jit
def _attend_range(
    q, acc, m, l, own, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, k_page_stride, v_page_stride,
    scales_page_stride, begin, stop, low, end, window, scale, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr, MASK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The tiles that start in [begin, stop)."""
    for start in tl.range(begin, stop, BLOCK_S, num_stages=STAGES):
        page = _tile_pages(table_ptr, start, low, end, PAGE, BLOCK_S, MASK)
        k = _load_tile(k_ptr, page, k_page_stride, start, low, end, D, BLOCK_D, PAGE, BLOCK_S, MASK)
        v = _load_tile(v_ptr, page, v_page_stride, start, low, end, D, BLOCK_D, PAGE, BLOCK_S, MASK)
        if SCALED:
            k_scale, v_scale = load_scales(
                k_scales_ptr, v_scales_ptr, page, scales_page_stride, start, low, end, PAGE, BLOCK_S
            )
        else:
            k_scale, v_scale = 1.0, 1.0
        acc, m, l = _attend(
            q, k, v, k_scale, v_scale, acc, m, l, own, start, window, scale, softcap,
            BLOCK_S, WINDOW, SOFTCAP, SCALED, MASK, UPCAST,
        )  # fmt: skip
    return acc, m, l


@triton.jit(do_not_specialize=["T", "N", "window", "table_stride"])
def chunk_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, bounds_ptr, rows_ptr, lengths_ptr, sinks_ptr, out_ptr,
    T, N, q_stride, table_stride, k_page_stride, v_page_stride, scales_page_stride, scale, softcap, window,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [tiles * HKV]. The last tiles start first: late in a sequence they are long, the short ones fill gaps."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head, tile = program % HKV, program // HKV
    n, first_tile = _chunk_of_tile(bounds_ptr, N, tile, BLOCK_Q)
    chunk = tl.load(bounds_ptr + n, cache_modifier=".cg")
    chunk_end = tl.load(bounds_ptr + n + 1, mask=n < N, other=0, cache_modifier=".cg")
    chunk_end = tl.where(n < N, chunk_end, T)
    row = tl.load(rows_ptr + n, mask=n < N, other=0, cache_modifier=".cg")
    length = tl.load(lengths_ptr + n, mask=n < N, other=0, cache_modifier=".cg")
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = chunk + (tile - first_tile) * BLOCK_Q
    if token >= chunk_end:
        return
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    there = (r < BLOCK_Q * G) & (token + r // G < chunk_end)
    mask = there[:, None] if BLOCK_D == D else there[:, None] & (d < D)[None, :]
    at = (token + r // G).to(tl.int64)
    q = tl.load(q_ptr + (at * q_stride + (head * G + r % G) * D)[:, None] + d[None, :], mask=mask, other=0.0)
    if SCALED:
        q, _, size = normalized(q, q, UPCAST)
        scale *= size
    first = length - chunk_end + token
    last = tl.minimum(first + BLOCK_Q, length) - 1
    low, start, full, full_end, end = _visible(first, last, length, window, BLOCK_S, WINDOW)
    own = first + r // G
    k_ptr += head * PAGE * D
    v_ptr += head * PAGE * D
    if SCALED:
        k_scales_ptr += head * PAGE
        v_scales_ptr += head * PAGE
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if WINDOW:
        acc, m, l = _attend_range(
            q, acc, m, l, own, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, k_page_stride, v_page_stride,
            scales_page_stride, start, full, low, end, window, scale, softcap,
            D, BLOCK_D, PAGE, BLOCK_S, STAGES, WINDOW, SOFTCAP, SCALED, True, UPCAST,
        )  # fmt: skip
    acc, m, l = _attend_range(
        q, acc, m, l, own, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, k_page_stride, v_page_stride,
        scales_page_stride, full, full_end, low, end, window, scale, softcap,
        D, BLOCK_D, PAGE, BLOCK_S, STAGES, WINDOW, SOFTCAP, SCALED, False, UPCAST,
    )  # fmt: skip
    acc, m, l = _attend_range(
        q, acc, m, l, own, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, k_page_stride, v_page_stride,
        scales_page_stride, full_end, end, low, end, window, scale, softcap,
        D, BLOCK_D, PAGE, BLOCK_S, STAGES, WINDOW, SOFTCAP, SCALED, True, UPCAST,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks_ptr + head * G + r % G).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        fade = tl.exp2(m - top)
        acc, l = acc * fade[:, None], l * fade + tl.exp2(sink - top)
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    out_at = out_ptr + (at * (HKV * G * D) + (head * G + r % G) * D)[:, None] + d[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)
