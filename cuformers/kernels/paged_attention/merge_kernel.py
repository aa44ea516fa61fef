"""How a sequence's keys are cut into splits, and how partial results become outputs.

Partial results are merged in the order of the splits, by the last program to arrive or by a second kernel.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def stretch(
    length, window, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """(first visible key, start of split 0, keys per split, splits that have keys); the last is 0 for no keys.

    A split has LEAST keys at the least: merging costs more than a few keys.
    """
    first = tl.maximum(length - window, 0) if WINDOW else 0
    start = first // BLOCK_S * BLOCK_S
    blocks = tl.cdiv(length - start, BLOCK_S)
    per_split = tl.maximum(tl.cdiv(blocks, SPLITS) * BLOCK_S, LEAST)
    return first, start, per_split, tl.cdiv(length - start, per_split)


@triton.jit
def store_whole(acc, m, l, sinks_ptr, out_ptr, pair, head, g, SINKS: tl.constexpr, D: tl.constexpr, G: tl.constexpr):
    """Stores the outputs of all heads of a pair that needed one split only. acc: [BLOCK_M, BLOCK_D]."""
    d = tl.arange(0, acc.shape[1])
    if SINKS:
        sink = tl.load(sinks_ptr + head * G + g, mask=g < G, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        fade = tl.exp2(m - top)
        acc, l = acc * fade[:, None], l * fade + tl.exp2(sink - top)
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    at = out_ptr + (pair * G + g)[:, None] * D + d[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])


@triton.jit
def store_part(acc, m, l, part_ptr, stats_ptr, part, g, D: tl.constexpr, G: tl.constexpr):
    """Stores the partial results of a pair's heads; `part` counts (pair, split)."""
    d = tl.arange(0, acc.shape[1])
    row = part * G + g
    tl.store(part_ptr + row[:, None] * D + d[None, :], acc, mask=(g < G)[:, None] & (d < D)[None, :])
    tl.store(stats_ptr + row * 2, m, mask=g < G)
    tl.store(stats_ptr + row * 2 + 1, l, mask=g < G)


@triton.jit
def _load_parts(
    part_ptr, stats_ptr, pair, g, active,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A head's maxima [SPLITS], sums [SPLITS] and outputs [SPLITS, BLOCK_D]; `pair` counts (sequence, kv head)."""
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    there = split < active
    row = (pair * SPLITS + split) * G + g
    m = tl.load(stats_ptr + row * 2, mask=there, other=-float("inf"), cache_modifier=".cg")
    l = tl.load(stats_ptr + row * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    mask = there[:, None] & (d < D)[None, :]
    return m, l, tl.load(part_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _store_merged(
    parts, sinks_ptr, out_ptr, pair, head, g,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Stores one head's output from its parts; `head` is its number among all query heads of a sequence."""
    m, l, part = parts
    top = tl.max(m, axis=0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == -float("inf"), 0.0, top)
    share = tl.exp2(m - top)
    total = tl.sum(share * l, axis=0)
    if SINKS:
        total += tl.exp2(sink - top)
    out = tl.sum(share[:, None] * part, axis=0) / tl.where(total == 0.0, 1.0, total)
    d = tl.arange(0, BLOCK_D)
    tl.store(out_ptr + (pair * G + g) * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def merge_pair(
    part_ptr, stats_ptr, sinks_ptr, out_ptr, pair, head, active,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Stores the outputs of all heads of a pair: two at a time, so that the loads of both are in flight together."""
    for i in tl.static_range(0, G, 2):
        parts = _load_parts(part_ptr, stats_ptr, pair, i, active, G, D, BLOCK_D, SPLITS)
        if i + 1 < G:
            more = _load_parts(part_ptr, stats_ptr, pair, i + 1, active, G, D, BLOCK_D, SPLITS)
        _store_merged(parts, sinks_ptr, out_ptr, pair, head * G + i, i, G, D, BLOCK_D, SINKS)
        if i + 1 < G:
            _store_merged(more, sinks_ptr, out_ptr, pair, head * G + i + 1, i + 1, G, D, BLOCK_D, SINKS)


@triton.jit(do_not_specialize=["window"])
def merge_kernel(
    part_ptr, stats_ptr, sinks_ptr, out_ptr, lengths_ptr, window,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    LEAST: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [N * HKV, G]: one program per query head."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    length = tl.load(lengths_ptr + pair // HKV, cache_modifier=".cg")
    active = stretch(length, window, SPLITS, BLOCK_S, LEAST, WINDOW)[3]
    if PDL:
        tl.extra.cuda.gdc_wait()
    parts = _load_parts(part_ptr, stats_ptr, pair, g, active, G, D, BLOCK_D, SPLITS)
    _store_merged(parts, sinks_ptr, out_ptr, pair, (pair % HKV) * G + g, g, G, D, BLOCK_D, SINKS)
