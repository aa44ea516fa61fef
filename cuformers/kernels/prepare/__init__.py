"""prepare: the inputs of an engine's step, from its plan and the decode state, so that the host uploads no token twice.

    prepare(plan, state, tokens: int, rows: int) -> StepInput

A step's stream is T = `tokens` tokens of prompt chunks, then one token of each of the first B = `rows` rows of the
`DecodeState`. `plan` is a `ChunkPlan` of N chunks, of any rows. Tokens past the last chunk are padding.
"""

from typing import NamedTuple

from torch import Tensor

from cuformers.kernels.op import two_ways


class ChunkPlan(NamedTuple):
    """Stretches of prompts to compute, all int32; empty chunks fill it up."""

    bounds: Tensor
    """[N + 1]: where each chunk begins in the stream, ascending from 0."""
    rows: Tensor
    """[N]: row of the decode state whose history the chunk is from."""
    starts: Tensor
    """[N]: position of the chunk's first token."""
    reached: Tensor
    """[N]: length of the whole prompt that the chunk is from."""
    final: Tensor
    """[N]: 1 where the prompt ends with the chunk, so that a token is sampled after it."""

    @staticmethod
    def size(chunks: int) -> int:
        """Elements of a packed plan."""
        return 5 * chunks + 1

    @staticmethod
    def unpack(packed: Tensor) -> "ChunkPlan":
        """The parts of a packed plan [5 N + 1] as views."""
        n = packed.numel() // 5
        return ChunkPlan(*packed.split((n + 1, n, n, n, n)))


class StepInput(NamedTuple):
    """What a step reads: T chunk tokens, then one of each of B rows."""

    tokens: Tensor
    """[T + B], int64."""
    positions: Tensor
    """[T + B], int32."""
    reached: Tensor
    """[T + B], int32: length of the sequence that each token counts for (see `Rotary`); 0 for padding and idle rows."""
    slots: Tensor
    """[G, T + B], int32: where keys and values go, by group of layers; -1 writes nothing."""
    lengths: Tensor
    """[N], int32: keys of each chunk's row, the chunk's own included; 0 for empty chunks."""
    last: Tensor
    """[N + B], int32: index in the stream of the token that each sampled token follows."""
    rows: Tensor
    """[N + B], int32: row that takes the sampled token; -1 where none does."""


OP = two_ways(__name__, "prepare")
