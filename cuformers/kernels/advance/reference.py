"""advance in plain PyTorch: the specification."""

from torch import Tensor

from cuformers.kernels.advance import DecodeState


def advance(sampled: Tensor, state: DecodeState) -> None:
    """Appends each busy row's sampled token to its history and moves the row on; rows that end become idle."""
    busy = state.lengths > 0
    index = (state.positions + 1).clamp(max=state.history.shape[1] - 1).long()[:, None]
    kept = state.history.gather(1, index)[:, 0]
    state.history.scatter_(1, index, kept.where(~busy, sampled.int())[:, None])
    state.tokens.copy_(state.tokens.where(~busy, sampled))
    state.positions.add_(busy.int())
    length = state.positions + 1
    ends = (sampled[:, None] == state.eos).any(1) | (length >= state.limits)
    runs = busy & ~ends
    page = (state.positions // state.page_size).long().clamp(max=state.block_tables.shape[1] - 1)
    slot = state.block_tables.gather(1, page[:, None])[:, 0] * state.page_size + state.positions % state.page_size
    state.lengths.copy_(length * runs)
    state.slots.copy_(slot.masked_fill(~runs, -1))
