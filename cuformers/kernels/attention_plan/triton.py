"""The work list of decode attention in one small launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels import attention_plan as package
from cuformers.kernels.attention_plan import AttentionPlan
from cuformers.kernels.attention_plan.rule import Rule, choose
from cuformers.kernels.launch import sms

ALONE = tl.constexpr(package.ALONE)
NEWEST = tl.constexpr(package.NEWEST)
ROWS_AT_ONCE = 256
"""Rows that a program looks at at once."""


@triton.jit
def _blocks(length, window, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """(first visible key, visible blocks) of rows; no key makes no block."""
    first_key = tl.maximum(length - window, 0) if WINDOW else length * 0
    return first_key, tl.cdiv(length, BLOCK) - first_key // BLOCK


@triton.jit
def _stretch(lengths_ptr, N, window, wave, most, long, least, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
             WINDOW: tl.constexpr):  # fmt: skip
    """Blocks of a stretch."""
    total = 0
    for at in range(0, N, BLOCK_N):
        n = at + tl.arange(0, BLOCK_N)
        total += tl.sum(_blocks(tl.load(lengths_ptr + n, mask=n < N, other=0), window, BLOCK, WINDOW)[1], 0)
    return tl.maximum(tl.maximum(tl.minimum(tl.cdiv(total, wave), long), tl.cdiv(total, most)), least)


@triton.jit
def _store(rows_ptr, at, a, b, c, d, mask):
    """Four numbers in each of the rows `at` of a list."""
    tl.store(rows_ptr + at * 4, a, mask=mask)
    tl.store(rows_ptr + at * 4 + 1, b, mask=mask)
    tl.store(rows_ptr + at * 4 + 2, c, mask=mask)
    tl.store(rows_ptr + at * 4 + 3, d, mask=mask)


@triton.jit
def _fill(rows_ptr, used, size, share, shares, BLOCK_I: tl.constexpr):
    """Says "no row" from `used` on; this program does its share."""
    for at in range(used + share * BLOCK_I, size, shares * BLOCK_I):
        i = at + tl.arange(0, BLOCK_I)
        _store(rows_ptr, i, -1, 0, 0, 0, i < size)


@triton.jit(do_not_specialize=["N", "window", "wave", "most", "long", "least", "num_items", "num_split_rows"])
def plan_kernel(
    lengths_ptr, items_ptr, splits_ptr, N, window, wave, most, long, least, num_items, num_split_rows,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid [N]: each program looks at all rows and writes the items of its own; together they fill up both lists."""
    mine = tl.program_id(0)
    size = _stretch(lengths_ptr, N, window, wave, most, long, least, BLOCK, BLOCK_N, WINDOW)
    length = tl.load(lengths_ptr + mine)
    first_key, blocks = _blocks(length, window, BLOCK, WINDOW)
    count = tl.maximum(tl.cdiv(blocks, size), 1)
    piece = tl.cdiv(blocks, count)
    # A row's place is the sum over all rows before it, longer pieces being before: no sort.
    first = 0
    split = 0
    all_items = 0
    all_split = 0
    for at in range(0, N, BLOCK_N):
        n = at + tl.arange(0, BLOCK_N)
        others = _blocks(tl.load(lengths_ptr + n, mask=n < N, other=0), window, BLOCK, WINDOW)[1]
        counts = tl.maximum(tl.cdiv(others, size), 1)
        pieces = tl.cdiv(others, counts)
        counts = tl.where(n < N, counts, 0)
        before = (pieces > piece) | ((pieces == piece) & (n < mine))
        first += tl.sum(tl.where(before, counts, 0), 0)
        split += tl.sum(((counts > 1) & (n < mine)).to(tl.int32), 0)
        all_items += tl.sum(counts, 0)
        all_split += tl.sum((counts > 1).to(tl.int32), 0)
    for at in range(0, count, BLOCK_I):
        i = at + tl.arange(0, BLOCK_I)
        start = first_key // BLOCK
        begin = tl.maximum((start + i * blocks // count) * BLOCK, first_key)
        end = tl.minimum((start + (i + 1) * blocks // count) * BLOCK, length)
        flags = tl.where(count == 1, ALONE, 0) + tl.where(i == count - 1, NEWEST, 0)
        # The last condition holds unless a row outgrew `longest`.
        _store(items_ptr, first + i, mine, begin, end, flags, (i < count) & (first + i < num_items))
    if count > 1:
        _store(splits_ptr, split, mine, first, count, 0, split < num_split_rows)
    _fill(items_ptr, all_items, num_items, mine, N, BLOCK_I)
    _fill(splits_ptr, all_split, num_split_rows, mine, N, BLOCK_I)


def attention_plan(
    lengths: Tensor,
    *,
    num_kv_heads: int,
    window: int | None = None,
    block: int = 64,
    stretch: int | None = None,
    longest: int | None = None,
    num_sms: int | None = None,
    rule: Rule | None = None,
) -> AttentionPlan:
    """See the package."""
    N = lengths.numel()
    rule = rule or choose(
        N,
        num_kv_heads=num_kv_heads,
        window=window,
        block=block,
        stretch=stretch,
        longest=longest,
        num_sms=num_sms or sms(lengths.device),
    )
    items = torch.empty((rule.num_items, 4), dtype=torch.int32, device=lengths.device)
    split_rows = torch.empty((rule.num_split_rows, 4), dtype=torch.int32, device=lengths.device)
    plan_kernel[(N,)](
        lengths, items, split_rows, N, window or 0, *rule,
        BLOCK=block, BLOCK_N=min(ROWS_AT_ONCE, max(16, triton.next_power_of_2(N))), BLOCK_I=64,
        WINDOW=window is not None, num_warps=1,
    )  # fmt: skip
    return AttentionPlan(items, split_rows)
