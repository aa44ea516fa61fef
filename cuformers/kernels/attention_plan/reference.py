"""The work list of decode attention: the specification."""

import torch
from torch import Tensor

from cuformers.kernels.attention_plan import ALONE, NEWEST, AttentionPlan
from cuformers.kernels.attention_plan.rule import Rule, choose
from cuformers.kernels.launch import sms


def attention_plan(
    lengths: Tensor,
    *,
    num_kv_heads: int,
    window: int | None = None,
    block: int = 64,
    stretch: int | None = None,
    longest: int | None = None,
    num_sms: int | None = None,
    rule: Rule | None = None,
) -> AttentionPlan:
    """See the package."""
    N = lengths.numel()
    rule = rule or choose(
        N,
        num_kv_heads=num_kv_heads,
        window=window,
        block=block,
        stretch=stretch,
        longest=longest,
        num_sms=num_sms or sms(lengths.device),
    )
    first_key = lengths.new_zeros(N) if window is None else (lengths - window).clamp(min=0)
    first_block = first_key // block
    blocks = _ceil(lengths, block) - first_block
    total = blocks.sum()
    size = torch.maximum(_ceil(total, rule.wave).clamp(max=rule.long), _ceil(total, rule.most)).clamp(min=rule.least)
    count = _ceil(blocks, size).clamp(min=1)
    order = torch.argsort(_ceil(blocks, count), descending=True, stable=True)
    ends = count[order].cumsum(0)
    starts = torch.empty_like(ends).index_copy_(0, order, ends - count[order])

    item = torch.arange(rule.num_items, device=lengths.device)
    place = torch.searchsorted(ends, item, right=True)
    there = place < N
    row = order[place.clamp(max=N - 1)]
    piece, pieces = item - starts[row], count[row]
    begin = (first_block[row] + piece * blocks[row] // pieces) * block
    end = (first_block[row] + (piece + 1) * blocks[row] // pieces) * block
    begin, end = torch.maximum(begin, first_key[row]), torch.minimum(end, lengths[row])
    flags = ALONE * (pieces == 1) + NEWEST * (piece == pieces - 1)
    items = torch.stack((row, begin, end, flags), 1).where(there[:, None], torch.tensor((-1, 0, 0, 0)).to(row))
    return AttentionPlan(items.int(), _split_rows(count, starts, rule.num_split_rows))


def _split_rows(count: Tensor, starts: Tensor, R: int) -> Tensor:
    """[R, 4] int32: the rows of several items, in their order."""
    split = count > 1
    found = torch.stack((torch.arange(len(count), device=count.device), starts, count, torch.zeros_like(count)), 1)
    packed = found[torch.argsort(split.int(), descending=True, stable=True)]
    there = torch.arange(len(count), device=count.device) < split.sum()
    return packed.where(there[:, None], torch.tensor((-1, 0, 0, 0)).to(packed))[:R].int()


def _ceil(x: Tensor, y: Tensor | int) -> Tensor:
    return (x + (y - 1)) // y
