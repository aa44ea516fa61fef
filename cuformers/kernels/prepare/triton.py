"""prepare as one Triton kernel: programs for the stream's tokens, then some for what is counted by chunk and row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels.advance import DecodeState
from cuformers.kernels.launch import pdl
from cuformers.kernels.prepare import ChunkPlan, StepInput

BLOCK = 128


@triton.jit
def _chunk_of(bounds_ptr, index, N, STEPS: tl.constexpr):
    """The chunk that each token of the stream is in: the number of bounds, from the second on, that are not past it."""
    low = tl.zeros_like(index)
    high = low + N
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        go = low < high
        past = tl.load(bounds_ptr + middle + 1, mask=go, other=0) <= index
        low = tl.where(go & past, middle + 1, low)
        high = tl.where(go & (~past), middle, high)
    return tl.minimum(low, N - 1)


@triton.jit(do_not_specialize=["T", "N", "B"])
def prepare_kernel(
    bounds, rows, starts, reached, final, tokens, positions, lengths, slots, block_tables, history,
    out_tokens, out_positions, out_reached, out_slots, out_lengths, out_last, out_rows,
    T, N, B, group_stride, table_stride, slot_stride, history_stride,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of T chunk tokens, of B rows, of N chunks, in this order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token_blocks, row_blocks = tl.cdiv(T, BLOCK), tl.cdiv(B, BLOCK)
    block = tl.program_id(0)
    total = T + B
    if block < token_blocks:
        index = block * BLOCK + tl.arange(0, BLOCK)
        inside = index < T
        there = index < tl.load(bounds + N)
        chunk = _chunk_of(bounds, index, N, STEPS)
        row = tl.load(rows + chunk).to(tl.int64)
        position = tl.where(there, tl.load(starts + chunk) + index - tl.load(bounds + chunk), 0)
        token = tl.load(history + row * history_stride + position, mask=there, other=0).to(tl.int64)
        tl.store(out_tokens + index, token, mask=inside)
        tl.store(out_positions + index, position, mask=inside)
        tl.store(out_reached + index, tl.where(there, tl.load(reached + chunk), 0), mask=inside)
        for group in tl.static_range(GROUPS):
            at = block_tables + group * group_stride.to(tl.int64) + row * table_stride + position // PAGE
            page = tl.load(at, mask=there, other=0)
            slot = tl.where(there, page * PAGE + position % PAGE, -1)
            tl.store(out_slots + group * total + index, slot, mask=inside)
    elif block < token_blocks + row_blocks:
        own = (block - token_blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = own < B
        length = tl.load(lengths + own, mask=inside, other=0)
        tl.store(out_tokens + T + own, tl.load(tokens + own, mask=inside, other=0), mask=inside)
        tl.store(out_positions + T + own, tl.load(positions + own, mask=inside, other=0), mask=inside)
        tl.store(out_reached + T + own, length, mask=inside)
        tl.store(out_last + N + own, T + own, mask=inside)
        tl.store(out_rows + N + own, tl.where(length > 0, own, -1), mask=inside)
        for group in tl.static_range(GROUPS):
            slot = tl.load(slots + group * slot_stride + own, mask=inside, other=-1)
            tl.store(out_slots + group * total + T + own, slot, mask=inside)
    else:
        chunk = (block - token_blocks - row_blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = chunk < N
        begin = tl.load(bounds + chunk, mask=inside, other=0)
        end = tl.load(bounds + chunk + 1, mask=inside, other=0)
        filled = end > begin
        keys = tl.load(starts + chunk, mask=inside, other=0) + end - begin
        taker = tl.load(rows + chunk, mask=inside, other=0)
        ends = tl.load(final + chunk, mask=inside, other=0) != 0
        tl.store(out_lengths + chunk, tl.where(filled, keys, 0), mask=inside)
        tl.store(out_last + chunk, tl.maximum(end - 1, 0), mask=inside)
        tl.store(out_rows + chunk, tl.where(filled & ends, taker, -1), mask=inside)


def prepare(plan: ChunkPlan, state: DecodeState, tokens: int, rows: int) -> StepInput:
    """See the package."""
    N, B, G = plan.rows.numel(), rows, state.slots.shape[0]
    device, total = plan.bounds.device, tokens + rows

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    out = StepInput(
        tokens=torch.empty(total, dtype=torch.int64, device=device),
        positions=ints(total), reached=ints(total), slots=ints(G, total), lengths=ints(N), last=ints(N + B),
        rows=ints(N + B),
    )  # fmt: skip
    tables = state.block_tables
    grid = (triton.cdiv(tokens, BLOCK) + triton.cdiv(B, BLOCK) + triton.cdiv(N, BLOCK),)
    prepare_kernel[grid](
        *plan, state.tokens, state.positions, state.lengths, state.slots, tables, state.history, *out,
        tokens, N, B, tables.stride(0), tables.stride(1), state.slots.stride(0), state.history.stride(0),
        STEPS=N.bit_length() + 1, GROUPS=G, PAGE=state.page_size, BLOCK=BLOCK, num_warps=4, **pdl(device),
    )  # fmt: skip
    return out
