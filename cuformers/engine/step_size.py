"""Sizes of the engine's steps: a captured graph has a fixed one, so few sizes serve all steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cuformers.kernels.prepare import ChunkPlan

ROW_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
MIN_TOKENS = 16
MAX_TOKENS = 16384
"""Longer streams keep the GPU busy without a graph."""


class Stretch(Protocol):
    """What a step's size and plan need to know of a chunk."""

    @property
    def row(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def reached(self) -> int: ...
    @property
    def final(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """Tokens of prompt chunks, chunks, and decoding rows."""

    tokens: int
    chunks: int
    rows: int

    @staticmethod
    def exact(chunks: Sequence[Stretch], rows: int) -> "StepSize":
        """The size without any padding."""
        return StepSize(tokens=sum(c.count for c in chunks), chunks=len(chunks), rows=rows)

    def rounded(self, num_rows: int) -> "StepSize | None":
        """The least size of a graph that holds so much; None where a graph does not pay.

        Args:
            num_rows: rows of the engine's table.
        """
        if self.tokens > MAX_TOKENS:
            return None
        if not self.tokens:
            rows = next((size for size in ROW_SIZES if size >= self.rows), num_rows)
            return StepSize(tokens=0, chunks=0, rows=min(rows, num_rows))
        # Beside chunks a few idle rows cost next to nothing, so rows come in three sizes.
        rows = next(size for size in (0, 32, num_rows) if size >= self.rows)
        return StepSize(
            tokens=_quarters(self.tokens), chunks=min(4 ** -(-(self.chunks - 1).bit_length() // 2), num_rows),
            rows=min(rows, num_rows),
        )  # fmt: skip


def _quarters(tokens: int) -> int:
    """The least multiple of a quarter octave, or power of two, that holds so many."""
    octave = max(MIN_TOKENS, 1 << max((tokens - 1).bit_length() - 1, 0))
    return max(octave, -(-tokens // (octave // 4)) * (octave // 4))


def pack(chunks: Sequence[Stretch], size: StepSize) -> Tensor:
    """The chunk plan of a step as one int32 tensor on the host; see `ChunkPlan`."""
    packed = torch.zeros(ChunkPlan.size(size.chunks), dtype=torch.int32)
    plan, n = ChunkPlan.unpack(packed), len(chunks)
    ends = torch.tensor([c.count for c in chunks], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    plan.bounds[1:] = ends[-1]
    plan.bounds[1 : n + 1] = ends
    plan.rows[:n], plan.starts[:n], plan.reached[:n], plan.final[:n] = torch.tensor(
        [[c.row, c.start, c.reached, c.final] for c in chunks], dtype=torch.int32
    ).T
    return packed
