"""From a row and its drafts to the rows of a step."""

import triton
import triton.language as tl


@triton.jit
def _queries(
    row, total, tokens, positions, lengths, limits, block_tables, drafts,
    out_tokens, out_positions, out_lengths, out_slots,
    group_stride, table_stride, GROUPS: tl.constexpr, PAGE: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Stores everything but the tables of the K + 1 rows that row `row` becomes."""
    j = tl.arange(0, BLOCK_K)
    inside = j <= K
    token = tl.load(drafts + row * K + j - 1, mask=(j > 0) & inside, other=-1)
    token = tl.where(j == 0, tl.load(tokens + row), token)
    missing = tl.min(tl.where(token < 0, j, BLOCK_K), axis=0)
    position = tl.load(positions + row) + j
    runs = (tl.load(lengths + row) > 0) & (j < missing) & (position < tl.load(limits + row) - 1)
    out = row * (K + 1) + j
    tl.store(out_tokens + out, tl.where(runs, token, 0), mask=inside)
    tl.store(out_positions + out, tl.where(runs, position, 0), mask=inside)
    tl.store(out_lengths + out, tl.where(runs, position + 1, 0), mask=inside)
    for group in tl.static_range(GROUPS):
        at = block_tables + group * group_stride.to(tl.int64) + row.to(tl.int64) * table_stride
        page = tl.load(at + position // PAGE, mask=runs & inside, other=0)
        slot = tl.where(runs, page * PAGE + position % PAGE, -1)
        tl.store(out_slots + group * total + out, slot, mask=inside)


@triton.jit
def spread_kernel(
    tokens, positions, lengths, limits, block_tables, drafts,
    out_tokens, out_positions, out_lengths, out_slots, out_tables, M, group_stride, table_stride,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [B, blocks of M]: each program repeats its part of the row's tables, the first one does the rest too."""
    row, block = tl.program_id(0), tl.program_id(1)
    total = tl.num_programs(0) * (K + 1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if block == 0:
        _queries(
            row, total, tokens, positions, lengths, limits, block_tables, drafts,
            out_tokens, out_positions, out_lengths, out_slots, group_stride, table_stride, GROUPS, PAGE, K, BLOCK_K,
        )  # fmt: skip
    index = block * BLOCK + tl.arange(0, BLOCK)
    for group in tl.static_range(GROUPS):
        at = block_tables + group * group_stride.to(tl.int64) + row.to(tl.int64) * table_stride
        pages = tl.load(at + index, mask=index < M)
        out = out_tables + (group * total + row * (K + 1)).to(tl.int64) * M
        for j in range(K + 1):
            tl.store(out + j * M + index, pages, mask=index < M)
