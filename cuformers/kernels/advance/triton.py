"""advance as one small Triton kernel, a program a sampled token."""

import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels.advance import DecodeState
from cuformers.kernels.launch import pdl


@triton.jit
def advance_kernel(
    sampled, rows, tokens, positions, lengths, slots, limits, block_tables, history, eos,
    group_stride, table_stride, slot_stride, history_stride, eos_stride,
    num_eos, ROWS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr, EOS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if ROWS:
        row = tl.load(rows + r)
        takes = row >= 0
    else:
        row = r
        takes = tl.load(lengths + r) > 0
    if takes:
        token = tl.load(sampled + r)
        position = tl.load(positions + row) + 1
        tl.store(history + row.to(tl.int64) * history_stride + position, token.to(tl.int32))
        tl.store(tokens + row, token)
        tl.store(positions + row, position)
        index = tl.arange(0, EOS_BLOCK)
        stops = tl.load(eos + row * eos_stride + index, mask=index < num_eos, other=-1)
        hits = tl.sum((stops == token).to(tl.int32), 0)
        ends = (hits > 0) | (position + 1 >= tl.load(limits + row))
        tl.store(lengths + row, tl.where(ends, 0, position + 1))
        for group in tl.static_range(GROUPS):
            at = block_tables + group * group_stride.to(tl.int64) + row.to(tl.int64) * table_stride
            page = tl.load(at + position // PAGE, mask=~ends, other=0)
            slot = tl.where(ends, -1, page * PAGE + position % PAGE)
            tl.store(slots + group * slot_stride + row, slot)


def advance(sampled: Tensor, state: DecodeState, rows: Tensor | None = None) -> None:
    """See the package."""
    num_eos, tables = state.eos.shape[1], state.block_tables
    advance_kernel[(sampled.shape[0],)](
        sampled, state.lengths if rows is None else rows,
        state.tokens, state.positions, state.lengths, state.slots, state.limits, tables, state.history, state.eos,
        tables.stride(0), tables.stride(1), state.slots.stride(0), state.history.stride(0), state.eos.stride(0),
        num_eos, ROWS=rows is not None, GROUPS=tables.shape[0], PAGE=state.page_size,
        EOS_BLOCK=triton.next_power_of_2(max(num_eos, 1)), num_warps=1, **pdl(sampled.device),
    )  # fmt: skip
