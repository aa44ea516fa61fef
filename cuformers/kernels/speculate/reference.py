"""Drafts in plain PyTorch: the specification."""

import torch
from torch import Tensor

from cuformers.kernels.advance import DecodeState
from cuformers.kernels.advance.reference import advance
from cuformers.kernels.speculate import DraftRows


def draft_lookup(state: DecodeState, count: int, longest: int = 3) -> Tensor:
    """The tokens after the longest match of each row's end in its history, the last match where several are as long."""
    history, last = state.history, state.positions[:, None]
    index = torch.arange(history.shape[1], device=history.device)
    same = (index < last) & (state.lengths > 0)[:, None]
    matched = torch.zeros_like(history)  # tokens up to each index that are those up to `last`
    for back in range(longest):
        token = history.gather(1, (last - back).clamp(min=0).long())
        same = same & (index >= back) & (history.roll(back, 1) == token)
        matched += same
    best = matched.amax(1, keepdim=True)
    end = index.where(matched == best, -1).amax(1, keepdim=True)
    at = end + 1 + torch.arange(count, device=history.device) % (last - end).clamp(min=1)
    drafts = history.gather(1, at.clamp(max=history.shape[1] - 1)).long()
    return drafts.where(best > 0, -1)


def spread_drafts(state: DecodeState, drafts: Tensor) -> DraftRows:
    """Each row's own token and its drafts as rows that see one key more each."""
    width = drafts.shape[1] + 1
    tokens = torch.cat((state.tokens[:, None], drafts), dim=1)
    positions = state.positions[:, None] + torch.arange(width, dtype=torch.int32, device=drafts.device)
    runs = (state.lengths > 0)[:, None] & (positions < state.limits[:, None] - 1)
    runs &= (tokens >= 0).int().cumprod(1) > 0
    page = (positions // state.page_size).long().clamp(max=state.block_tables.shape[2] - 1)
    pages = state.block_tables.gather(2, page.expand(state.block_tables.shape[0], -1, -1))
    slots = pages * state.page_size + positions % state.page_size
    return DraftRows(
        tokens=tokens.where(runs, 0).flatten(),
        positions=positions.where(runs, 0).flatten(),
        lengths=(positions + 1).where(runs, 0).flatten(),
        slots=slots.masked_fill(~runs, -1).flatten(1),
        block_tables=state.block_tables.repeat_interleave(width, dim=1),
    )


def accept(sampled: Tensor, drafts: Tensor, state: DecodeState) -> Tensor:
    """Advances each row by its sampled tokens while it stays busy and was fed what it had sampled."""
    rows = torch.arange(len(sampled), dtype=torch.int32, device=sampled.device)
    takes = state.lengths > 0
    emitted = torch.full_like(sampled, -1)
    for j in range(sampled.shape[1]):
        emitted[:, j] = sampled[:, j].where(takes, -1)
        advance(emitted[:, j], state, rows.masked_fill(~takes, -1))
        if j < drafts.shape[1]:
            takes = takes & (state.lengths > 0) & (drafts[:, j] == sampled[:, j])
    return emitted
