"""advance as one small Triton kernel, a program a row."""

import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels.advance import DecodeState


@triton.jit
def advance_kernel(
    sampled, tokens, positions, lengths, slots, limits, block_tables, history, eos,
    table_stride, history_stride, eos_stride,
    num_eos, PAGE: tl.constexpr, EOS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tl.load(lengths + row) > 0:
        token = tl.load(sampled + row)
        position = tl.load(positions + row) + 1
        tl.store(history + row.to(tl.int64) * history_stride + position, token.to(tl.int32))
        tl.store(tokens + row, token)
        tl.store(positions + row, position)
        index = tl.arange(0, EOS_BLOCK)
        stops = tl.load(eos + row * eos_stride + index, mask=index < num_eos, other=-1)
        hits = tl.sum((stops == token).to(tl.int32), 0)
        if (hits > 0) | (position + 1 >= tl.load(limits + row)):
            tl.store(lengths + row, 0)
            tl.store(slots + row, -1)
        else:
            page = tl.load(block_tables + row.to(tl.int64) * table_stride + position // PAGE)
            tl.store(lengths + row, position + 1)
            tl.store(slots + row, page * PAGE + position % PAGE)


def advance(sampled: Tensor, state: DecodeState) -> None:
    """See the reference."""
    from cuformers.kernels.launch import use_pdl

    pdl = use_pdl(sampled.device)
    num_eos = state.eos.shape[1]
    advance_kernel[(sampled.shape[0],)](
        sampled, state.tokens, state.positions, state.lengths, state.slots, state.limits, state.block_tables,
        state.history, state.eos, state.block_tables.stride(0), state.history.stride(0), state.eos.stride(0), num_eos,
        PAGE=state.page_size, EOS_BLOCK=triton.next_power_of_2(max(num_eos, 1)), PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
