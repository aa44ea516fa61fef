"""What a step takes beside weights and cache, measured: run the largest one before the cache is made."""

from typing import NamedTuple

import torch

from cuformers.cuda import memory
from cuformers.engine.capacity import PAGE_SIZE, Capacity
from cuformers.engine.runner import Mode, Runner
from cuformers.nn.attention.backend import AttentionBackend
from cuformers.nn.cache import CacheLayout
from cuformers.nn.decoder import CausalLM


class _Piece(NamedTuple):
    """A stretch of a prompt that nobody wrote."""

    row: int
    start: int
    count: int
    reached: int
    final: bool


@torch.no_grad()
def step_bytes(
    model: CausalLM,
    backend: AttentionBackend | None,
    capacity: Capacity,
    layout: CacheLayout,
    max_batch_tokens: int,
    *,
    fp8_cache: bool = False,
) -> int:
    """Bytes at the most that the largest step takes: activations, logits, and what drawing tokens needs.

    The step runs over a cache of one page, without a graph: `max_batch_tokens` tokens of prompts beside all rows, each
    of which draws a token. 0 on the CPU, where memory is taken as it is used.
    """
    device = model.lm_head.weight.device
    if device.type == "cpu":
        return 0
    small = Capacity(rows=capacity.rows, length=capacity.length, pages=1, eos=capacity.eos)
    runner = Runner(model, backend, small, layout, use_graphs=False, page_size=PAGE_SIZE, fp8_cache=fp8_cache)
    memory.reset_peak(device)
    before = memory.allocated_bytes(device)
    runner.step(_pieces(small, max_batch_tokens), small.rows, Mode(sample=True))
    used = memory.peak_bytes(device) - before
    del runner
    memory.release_cached(device)
    return used


def _pieces(capacity: Capacity, tokens: int) -> list[_Piece]:
    """Prompts of so many tokens in all, as long as rows are."""
    counts = [min(capacity.length, tokens - at) for at in range(0, tokens, capacity.length)][: capacity.rows]
    return [_Piece(row, 0, count, count, True) for row, count in enumerate(counts)]
