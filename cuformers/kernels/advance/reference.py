"""advance in plain PyTorch: the specification."""

import torch
from torch import Tensor

from cuformers.kernels.advance import DecodeState


def advance(sampled: Tensor, state: DecodeState, rows: Tensor | None = None) -> None:
    """Appends each sampled token to its row's history and moves the row on; rows that end become idle."""
    count = state.lengths.shape[0]
    if rows is None:
        token, takes = sampled, state.lengths > 0
    else:
        # Spread over all rows; what no row takes goes to one more row, which is cut off.
        index = torch.where(rows < 0, count, rows).long()
        token = sampled.new_zeros(count + 1).scatter(0, index, sampled)[:count]
        takes = torch.zeros(count + 1, dtype=torch.bool, device=rows.device).scatter(0, index, True)[:count]
    position = state.positions + takes.int()
    index = position.clamp(max=state.history.shape[1] - 1).long()[:, None]
    kept = state.history.gather(1, index)[:, 0]
    state.history.scatter_(1, index, kept.where(~takes, token.int())[:, None])
    state.tokens.copy_(state.tokens.where(~takes, token))
    state.positions.copy_(state.positions.where(~takes, position))
    ends = (token[:, None] == state.eos).any(1) | (position + 1 >= state.limits)
    runs = takes & ~ends
    page = (position // state.page_size).long().clamp(max=state.block_tables.shape[2] - 1)
    pages = state.block_tables.gather(2, page[None, :, None].expand(state.slots.shape[0], -1, 1))[:, :, 0]
    slot = pages * state.page_size + position % state.page_size
    state.lengths.copy_(state.lengths.where(~takes, (position + 1) * runs))
    state.slots.copy_(state.slots.where(~takes, slot.masked_fill(~runs, -1)))
