"""Everything a layer needs beside the hidden states, in one frozen object."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from cuformers.kernels.attention_plan import AttentionPlan

if TYPE_CHECKING:
    from cuformers.nn.attention.backend import AttentionBackend
    from cuformers.nn.cache import PagedCache

Phase = Literal["full", "cached"]


class RopeRows(NamedTuple):
    """Rotary factors of a step: token t uses row `rows[t]` of the two tables."""

    cos: Tensor
    """[R, rotary_dim / 2], float32."""
    sin: Tensor
    """[R, rotary_dim / 2], float32."""
    rows: Tensor
    """[T], int32."""


class CacheView(NamedTuple):
    """Where the tokens of a step live in the paged cache."""

    cache: "PagedCache"
    block_tables: Tensor
    """[G, B, max_blocks], int32: pages of each row of the engine's table, by group of layers."""
    slots: Tensor
    """[G, T], int32: where each token's key and value are written, by group; negative writes nothing."""


class Chunks(NamedTuple):
    """Stretches of prompts at the front of a cached step's stream, all int32."""

    tokens: int
    """Tokens of the stream that belong to chunks or are padding; one token of each decoding row follows."""
    bounds: Tensor
    """[N + 1]: where each chunk begins in the stream."""
    rows: Tensor
    """[N]: row of the block tables that each chunk's keys are in."""
    lengths: Tensor
    """[N]: keys that each chunk's last token sees, its own included; 0 for empty chunks."""
    fresh: bool = False
    """Whether every chunk brings all its keys along, so that an attention backend can serve it without the cache."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward pass over a flat stream of T tokens from N sequences.

    In phase "full" every sequence's keys are the tokens of this very step: a training row, a plain forward. In phase
    "cached" keys are in the paged cache: the stream is chunks of prompts, if any, then one token of each decoding row.
    """

    phase: Phase
    """Which keys the tokens attend to."""
    positions: Tensor
    """[T], int32: position of each token in its sequence."""
    lengths: Tensor
    """[N], int32: number of keys of each sequence (phase "cached": of each decoding row), this step's included."""
    cu_seqlens: Tensor | None = None
    """[N + 1], int32: where each sequence that brings its keys along begins in the stream."""
    query_lengths: tuple[int, ...] | None = None
    """Tokens of each sequence as host integers; None where only the device knows them, as in a captured graph."""
    longest: int = 1
    """Tokens of the longest sequence of the stream, or a bound on it where only the device knows."""
    backend: "AttentionBackend | None" = None
    """Computes attention over sequences that bring their keys along."""
    cache: CacheView | None = None
    """The paged cache; None where nothing is kept."""
    chunks: Chunks | None = None
    """The chunks of a cached step; None where every row decodes."""
    plans: Mapping[int | None, AttentionPlan] = field(default_factory=dict)
    """How the attention of the decoding rows is cut, by window; empty leaves that to each layer."""
    newest: int = 1
    """Keys of a decoding row that this step writes: more than one where rows stand for drafts of one sequence."""
    reached: Tensor | None = None
    """[T], int32: least length of the sequence that each token counts for, which some rotary embeddings go by. None
    where it is the sequence's last position of this step."""
    rope: Mapping[str, RopeRows | None] | None = None
    """Rotary factors by the name that layers ask for; filled in by the decoder."""

    @property
    def uniform(self) -> int | None:
        """The common length S where the stream is a rectangle [N, S]; None where lengths differ or are not known."""
        lengths = self.query_lengths
        return self.longest if lengths and all(n == self.longest for n in lengths) else None


def full_step(positions: Tensor, query_lengths: tuple[int, ...], backend: "AttentionBackend") -> Step:
    """A step whose sequences bring all their keys along.

    Args:
        positions: [T], integer.
        query_lengths: tokens of each sequence, in the stream's order; they sum to T.
        backend: computes attention over the stream.
    """
    assert sum(query_lengths) == positions.numel(), f"lengths {query_lengths} do not sum to {positions.numel()} tokens"
    lengths = torch.tensor((0, *query_lengths), dtype=torch.int32).to(positions.device, non_blocking=True)
    return Step(
        phase="full",
        positions=positions.to(torch.int32),
        lengths=lengths[1:],
        cu_seqlens=lengths.cumsum(0, dtype=torch.int32),
        query_lengths=query_lengths,
        longest=max(query_lengths, default=1),
        backend=backend,
    )
