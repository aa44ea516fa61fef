"""The search for a row's last tokens in its history: by one program, or by several and one that merges.

A match is an int64: its length in the upper half, the index of its last token in the lower; 0 is none. So the greatest
is the longest, and the last of several as long.
"""

import triton
import triton.language as tl


@triton.jit
def _search(history, width, last, share, LONGEST: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """The best match of the tokens up to `last` in each SHARES-th block of the history, from its end on."""
    length = tl.full((), 0, tl.int32)
    end = tl.full((), 0, tl.int32)
    offset = tl.arange(0, BLOCK)
    block = last // BLOCK - share
    # A match of full length ends the search: those in earlier blocks are no longer.
    while (block >= 0) & (length < LONGEST):
        index = block * BLOCK + offset
        same = index < last
        matched = tl.zeros_like(offset)
        for back in tl.static_range(LONGEST):
            # Masked by the width, often a multiple of 16, the load of all tokens is vectorized; few go on from there.
            there = index < width if back == 0 else same & (index >= back)
            token = tl.load(history + index - back, mask=there, other=-1)
            same = same & there & (token == tl.load(history + tl.maximum(last - back, 0)))
            matched += same.to(tl.int32)
        best = tl.max(matched * BLOCK + offset, axis=0)
        end = tl.where(best // BLOCK > length, block * BLOCK + best % BLOCK, end)
        length = tl.maximum(length, best // BLOCK)
        block -= SHARES
    return (length.to(tl.int64) << 32) + end


@triton.jit
def _follow(drafts, history, last, match, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Stores the K tokens after a match, again from the first of them after the row's last one; -1 without a match."""
    j = tl.arange(0, BLOCK_K)
    end = match & 0xFFFFFFFF
    at = end + 1 + j % tl.maximum(last - end, 1)
    token = tl.load(history + at, mask=(match > 0) & (j < K), other=-1)
    tl.store(drafts + j, token.to(tl.int64), mask=j < K)


@triton.jit
def search_kernel(
    positions, lengths, history, drafts, matches, width, history_stride, LONGEST: tl.constexpr, SHARES: tl.constexpr,
    BLOCK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [B, SHARES]: stores the share's match; the drafts themselves where it is the only one."""
    row, share = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    history += row.to(tl.int64) * history_stride
    last = tl.load(positions + row)
    match = tl.full((), 0, tl.int64)
    if tl.load(lengths + row) > 0:
        match = _search(history, width, last, share, LONGEST, SHARES, BLOCK)
    if SHARES == 1:
        _follow(drafts + row * K, history, last, match, K, BLOCK_K)
    else:
        tl.store(matches + row * SHARES + share, match)


@triton.jit
def follow_kernel(
    positions, history, drafts, matches, history_stride, SHARES: tl.constexpr, BLOCK_SHARES: tl.constexpr,
    K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [B]: merges the shares' matches."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    share = tl.arange(0, BLOCK_SHARES)
    match = tl.max(tl.load(matches + row * SHARES + share, mask=share < SHARES, other=0), axis=0)
    history += row.to(tl.int64) * history_stride
    _follow(drafts + row * K, history, tl.load(positions + row), match, K, BLOCK_K)
