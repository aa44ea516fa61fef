"""What `advance` does, for all tokens of a row that hold, at once."""

import triton
import triton.language as tl


@triton.jit
def accept_kernel(
    sampled, drafts, emitted, tokens, positions, lengths, slots, limits, block_tables, history, eos,
    group_stride, table_stride, slot_stride, history_stride, eos_stride, num_eos,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, EOS_BLOCK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [B]."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    j = tl.arange(0, BLOCK_K)
    inside = j <= K
    busy = tl.load(lengths + row) > 0
    token = tl.load(sampled + row * (K + 1) + j, mask=inside, other=-1)
    draft = tl.load(drafts + row * K + j, mask=j < K, other=-1)
    stop = tl.arange(0, EOS_BLOCK)
    stops = tl.load(eos + row.to(tl.int64) * eos_stride + stop, mask=stop < num_eos, other=-1)
    first = tl.load(positions + row) + 1
    ends = (first + j + 1 >= tl.load(limits + row)) | (tl.sum((token[:, None] == stops[None, :]).to(tl.int32), 1) > 0)
    # The last token emitted is the first one that ends the row or that no draft foresaw.
    final = tl.min(tl.where(ends | (token != draft) | (j >= K), j, K), axis=0)
    taken = busy & (j <= final)
    tl.store(emitted + row * (K + 1) + j, tl.where(taken, token, -1), mask=inside)
    tl.store(history + row.to(tl.int64) * history_stride + first + j, token.to(tl.int32), mask=taken)
    if busy:
        position = first + final
        over = tl.sum((ends & (j == final)).to(tl.int32), axis=0) > 0
        tl.store(tokens + row, tl.sum(tl.where(j == final, token, 0), axis=0))
        tl.store(positions + row, position)
        tl.store(lengths + row, tl.where(over, 0, position + 1))
        for group in tl.static_range(GROUPS):
            at = block_tables + group * group_stride.to(tl.int64) + row.to(tl.int64) * table_stride
            page = tl.load(at + position // PAGE, mask=~over, other=0)
            slot = tl.where(over, -1, page * PAGE + position % PAGE)
            tl.store(slots + group * slot_stride + row, slot)
