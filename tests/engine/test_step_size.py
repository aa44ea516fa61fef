"""Steps come in few sizes, and a packed plan says what its chunks are."""

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from cuformers.engine.step_size import MAX_TOKENS, StepSize, pack
from cuformers.kernels.prepare import ChunkPlan


@dataclass(frozen=True)
class Piece:
    row: int
    start: int
    count: int
    reached: int
    final: bool


@given(st.integers(0, 2 * MAX_TOKENS), st.integers(1, 256), st.integers(0, 256), st.sampled_from([32, 64, 256]))
def test_a_rounded_size_holds_the_step(tokens: int, chunks: int, rows: int, num_rows: int) -> None:
    chunks, rows = min(chunks, num_rows, tokens), min(rows, num_rows)
    exact = StepSize(tokens=tokens, chunks=chunks, rows=rows)
    size = exact.rounded(num_rows)
    if size is None:
        assert tokens > MAX_TOKENS
        return
    assert size.tokens >= tokens and size.chunks >= chunks and num_rows >= size.rows >= rows
    assert size.tokens <= max(16, 1.25 * tokens) and (size.chunks == 0) == (tokens == 0)
    assert size.rounded(num_rows) == size


def test_sizes_are_few() -> None:
    decodes = {StepSize(tokens=0, chunks=0, rows=rows).rounded(256) for rows in range(1, 257)}
    mixed = {
        StepSize(tokens=tokens, chunks=min(chunks, tokens), rows=rows).rounded(256)
        for tokens in range(1, 8193) for chunks in (1, 3, 30, 256) for rows in (0, 1, 40, 256)
    }  # fmt: skip
    assert len(decodes) <= 15 and len({size.tokens for size in mixed if size}) <= 40 and len(mixed) <= 480


def test_a_plan_says_what_its_chunks_are() -> None:
    pieces = [Piece(3, 16, 5, 40, False), Piece(0, 0, 9, 9, True)]
    plan = ChunkPlan.unpack(pack(pieces, StepSize(tokens=32, chunks=4, rows=0)))
    assert plan.bounds.tolist() == [0, 5, 14, 14, 14] and plan.rows.tolist() == [3, 0, 0, 0]
    assert plan.starts.tolist() == [16, 0, 0, 0] and plan.reached.tolist() == [40, 9, 0, 0]
    assert plan.final.tolist() == [0, 1, 0, 0] and plan.bounds.dtype is torch.int32
