"""The launches: one for each op, and one more where several programs search a history."""

import torch
import triton
from torch import Tensor

from cuformers.kernels.advance import DecodeState
from cuformers.kernels.launch import pdl, sms
from cuformers.kernels.speculate import DraftRows
from cuformers.kernels.speculate.accept_kernel import accept_kernel
from cuformers.kernels.speculate.lookup_kernel import follow_kernel, search_kernel
from cuformers.kernels.speculate.spread_kernel import spread_kernel

BLOCK = 4096
"""Tokens of a history that a program looks at together."""
WARPS = 8
"""Of such a program."""
SHARE = 8192
"""Histories up to this width are searched by one program, as merging costs a launch."""
TABLE_BLOCK = 1024
"""Entries of a block table that a program repeats."""


def shares(rows: int, width: int, num_sms: int) -> int:
    """Programs that search one row's history."""
    return max(1, min(triton.cdiv(width, SHARE), num_sms // rows))


def draft_lookup(state: DecodeState, count: int, longest: int = 3) -> Tensor:
    """See the package."""
    history, device = state.history, state.history.device
    B, width = history.shape
    split = shares(B, width, sms(device))
    drafts = torch.empty(B, count, dtype=torch.int64, device=device)
    matches = torch.empty(B, split, dtype=torch.int64, device=device) if split > 1 else drafts
    block = min(BLOCK, triton.next_power_of_2(width))
    shape = {"SHARES": split, "K": count, "BLOCK_K": triton.next_power_of_2(count), **pdl(device)}
    search_kernel[(B, split)](
        state.positions, state.lengths, history, drafts, matches, width, history.stride(0),
        LONGEST=longest, BLOCK=block, num_warps=WARPS, **shape,
    )  # fmt: skip
    if split > 1:
        follow_kernel[(B,)](
            state.positions, history, drafts, matches, history.stride(0),
            BLOCK_SHARES=triton.next_power_of_2(split), num_warps=1, **shape,
        )  # fmt: skip
    return drafts


def spread_drafts(state: DecodeState, drafts: Tensor) -> DraftRows:
    """See the package."""
    tables, device = state.block_tables, drafts.device
    G, B, M = tables.shape
    K = drafts.shape[1]
    total = B * (K + 1)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    tokens = torch.empty(total, dtype=torch.int64, device=device)
    out = DraftRows(tokens, ints(total), ints(total), ints(G, total), ints(G, total, M))
    block = min(TABLE_BLOCK, triton.next_power_of_2(M))
    spread_kernel[(B, triton.cdiv(M, block))](
        state.tokens, state.positions, state.lengths, state.limits, tables, drafts.contiguous(), *out,
        M, tables.stride(0), tables.stride(1), GROUPS=G, PAGE=state.page_size,
        K=K, BLOCK_K=triton.next_power_of_2(K + 1), BLOCK=block, num_warps=4, **pdl(device),
    )  # fmt: skip
    return out


def accept(sampled: Tensor, drafts: Tensor, state: DecodeState) -> Tensor:
    """See the package."""
    B, K = drafts.shape
    sampled, tables, num_eos = sampled.contiguous(), state.block_tables, state.eos.shape[1]
    emitted = torch.empty_like(sampled)
    accept_kernel[(B,)](
        sampled, drafts.contiguous(), emitted,
        state.tokens, state.positions, state.lengths, state.slots, state.limits, tables, state.history, state.eos,
        tables.stride(0), tables.stride(1), state.slots.stride(0), state.history.stride(0), state.eos.stride(0),
        num_eos, GROUPS=tables.shape[0], PAGE=state.page_size, EOS_BLOCK=triton.next_power_of_2(max(num_eos, 1)),
        K=K, BLOCK_K=triton.next_power_of_2(K + 1), num_warps=1, **pdl(sampled.device),
    )  # fmt: skip
    return emitted
