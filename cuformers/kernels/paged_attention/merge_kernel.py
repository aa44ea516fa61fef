"""From running softmaxes to outputs: of a whole row, of a part of one, and of several parts merged in their order.

A running softmax is (acc, m, l): weighted values, maximum score in base 2, sum of the weights.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def store_whole(acc, m, l, sinks_ptr, out_ptr, row, head, g, SINKS: tl.constexpr, HQ: tl.constexpr, G: tl.constexpr,
                D: tl.constexpr):  # fmt: skip
    """Stores the outputs of a kv head's query heads. acc: [BLOCK_M, BLOCK_D]; without a key the output is zero."""
    d = tl.arange(0, acc.shape[1])
    if SINKS:
        sink = tl.load(sinks_ptr + head * G + g, mask=g < G, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        fade = tl.exp2(m - top)
        acc, l = acc * fade[:, None], l * fade + tl.exp2(sink - top)
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    at = out_ptr + (row * HQ + head * G + g)[:, None] * D + d[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])


@triton.jit
def store_part(acc, m, l, part_ptr, stats_ptr, item, head, g, HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """Stores the running softmaxes of a kv head's query heads over an item's keys."""
    d = tl.arange(0, acc.shape[1])
    part = item * HQ + head * G + g
    tl.store(part_ptr + part[:, None] * D + d[None, :], acc, mask=(g < G)[:, None] & (d < D)[None, :])
    tl.store(stats_ptr + part * 2, m, mask=g < G)
    tl.store(stats_ptr + part * 2 + 1, l, mask=g < G)


@triton.jit
def _merge(part_ptr, stats_ptr, part, there, acc, m, l, HQ: tl.constexpr, D: tl.constexpr):
    """One block of a head's parts joins its running softmax. part, there: [BLOCK_P]; acc: [BLOCK_D]."""
    d = tl.arange(0, acc.shape[0])
    ms = tl.load(stats_ptr + part * 2, mask=there, other=-float("inf"), cache_modifier=".cg")
    ls = tl.load(stats_ptr + part * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    mask = there[:, None] & (d < D)[None, :]
    accs = tl.load(part_ptr + part[:, None] * D + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    top = tl.maximum(m, tl.max(ms, axis=0))
    safe = tl.where(top == -float("inf"), 0.0, top)
    share, fade = tl.exp2(ms - safe), tl.exp2(m - safe)
    return acc * fade + tl.sum(share[:, None] * accs, axis=0), top, l * fade + tl.sum(share * ls, axis=0)


@triton.jit
def _split_row(splits_ptr, at, R):
    """(row, first item, items) number `at` of the plan's split rows; -1 for the row where there is none."""
    at_ptr = splits_ptr + at * 4
    row = tl.load(at_ptr, mask=at < R, other=-1, cache_modifier=".cg").to(tl.int64)
    first = tl.load(at_ptr + 1, mask=at < R, other=0, cache_modifier=".cg").to(tl.int64)
    return row, first, tl.load(at_ptr + 2, mask=at < R, other=0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["R"])
def merge_kernel(
    part_ptr, stats_ptr, sinks_ptr, out_ptr, splits_ptr, R,
    HQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [any, HQ]: a program merges one query head's parts, of every so many-th of the plan's R split rows.

    The rows that are there come first, so a program is done where it meets none.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    at, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    row, first, count = _split_row(splits_ptr, at, R)
    # Programs without work wait too: were all of them gone at once, this kernel would be over before its predecessor.
    if PDL:
        tl.extra.cuda.gdc_wait()
    while row >= 0:
        acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
        if SINKS:
            m = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
            l = m * 0.0 + 1.0
        else:
            m = -float("inf")
            l = 0.0
        for start in range(0, count, BLOCK_P):
            i = start + tl.arange(0, BLOCK_P)
            acc, m, l = _merge(part_ptr, stats_ptr, (first + i) * HQ + head, i < count, acc, m, l, HQ, D)
        out = acc / tl.where(l == 0.0, 1.0, l)
        tl.store(out_ptr + (row * HQ + head) * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
        at += tl.num_programs(0)
        row, first, count = _split_row(splits_ptr, at, R)
