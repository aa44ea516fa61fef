"""prepare in plain PyTorch: the specification."""

import torch

from cuformers.kernels.advance import DecodeState
from cuformers.kernels.prepare import ChunkPlan, StepInput


def prepare(plan: ChunkPlan, state: DecodeState, tokens: int, rows: int) -> StepInput:
    """Chunk tokens are read from the rows' histories, those of the rows from the state."""
    index = torch.arange(tokens, dtype=torch.int32, device=plan.bounds.device)
    chunk = torch.searchsorted(plan.bounds[1:], index, right=True).clamp(max=plan.rows.numel() - 1)
    there = index < plan.bounds[-1]
    row = plan.rows[chunk].long()
    position = (plan.starts[chunk] + index - plan.bounds[chunk]).where(there, 0)
    token = state.history[row, position.long()].long().where(there, 0)
    page = state.block_tables[:, row, (position // state.page_size).long()]
    slot = (page * state.page_size + position % state.page_size).masked_fill(~there, -1)
    counts = plan.bounds.diff()
    ends = plan.bounds[1:] - 1
    takers = plan.rows.masked_fill((plan.final == 0) | (counts == 0), -1)
    own = torch.arange(rows, dtype=torch.int32, device=index.device)
    lengths = state.lengths[:rows]
    return StepInput(
        tokens=torch.cat((token, state.tokens[:rows])),
        positions=torch.cat((position, state.positions[:rows])),
        reached=torch.cat((plan.reached[chunk].where(there, 0), lengths)),
        slots=torch.cat((slot, state.slots[:, :rows]), dim=1),
        lengths=(plan.starts + counts).masked_fill(counts == 0, 0),
        last=torch.cat((ends.clamp(min=0), own + tokens)),
        rows=torch.cat((takers, own.masked_fill(lengths == 0, -1))),
    )
