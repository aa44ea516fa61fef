"""Prompts as one flat stream: what a prefill step reads, and the sizes of the graphs that run it.

A captured prefill has a fixed number of tokens and sequences. What is left over is one filler sequence, whose tokens
write nothing to the cache and whose result nobody reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.engine.request import Request

MIN_TOKENS = 16
MAX_TOKENS = 8192
"""Longer streams keep the GPU busy without a graph."""


@dataclass(frozen=True, kw_only=True)
class PrefillSize:
    """Size of a captured prefill."""

    tokens: int
    sequences: int

    @staticmethod
    def of(tokens: int, sequences: int) -> "PrefillSize | None":
        """The least size that holds so much, in quarters of an octave; None where a graph does not pay."""
        if tokens > MAX_TOKENS:
            return None
        octave = max(MIN_TOKENS, 1 << max((tokens - 1).bit_length() - 1, 0))
        quarter = octave // 4
        rounded = max(octave, -(-tokens // quarter) * quarter)
        return PrefillSize(tokens=rounded, sequences=1 << (sequences - 1).bit_length())


class PrefillInput(NamedTuple):
    """What a prefill step reads, all int32."""

    tokens: Tensor
    """[T]."""
    positions: Tensor
    """[T]."""
    slots: Tensor
    """[T]: where keys and values go; -1 writes nothing."""
    bounds: Tensor
    """[N + 2]: where each sequence begins, the filler being the last."""
    last: Tensor
    """[N]: index of each sequence's last token."""


def layout(size: PrefillSize, packed: Tensor) -> PrefillInput:
    """The parts of a packed input [3 * T + 2 * N + 2] as views."""
    t, n = size.tokens, size.sequences
    return PrefillInput(*packed.split((t, t, t, n + 2, n)))


def pack(requests: Sequence[Request], size: PrefillSize, page_size: int) -> Tensor:
    """The input of a prefill as one int32 tensor on the host."""
    contexts = [r.context for r in requests]
    ends = torch.tensor([len(c) for c in contexts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total = int(ends[-1])
    packed = torch.zeros(3 * size.tokens + 2 * size.sequences + 2, dtype=torch.int32)
    parts = layout(size, packed)
    parts.tokens[:total] = torch.tensor([t for c in contexts for t in c], dtype=torch.int32)
    parts.positions[:total] = torch.cat([torch.arange(len(c), dtype=torch.int32) for c in contexts])
    parts.slots.fill_(-1)
    parts.slots[:total] = torch.cat([_slots(r.pages, len(c), page_size) for r, c in zip(requests, contexts)])
    parts.bounds[1:] = total
    parts.bounds[1 : len(contexts) + 1] = ends
    parts.bounds[-1] = size.tokens
    parts.last[: len(contexts)] = ends - 1
    return packed


def _slots(pages: list[int], length: int, page_size: int) -> Tensor:
    first = torch.tensor(pages, dtype=torch.int32)[:, None] * page_size
    return (first + torch.arange(page_size, dtype=torch.int32)).flatten()[:length]
