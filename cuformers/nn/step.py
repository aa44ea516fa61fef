"""Everything a layer needs beside the hidden states, in one frozen object."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cuformers.nn.attention.backend import AttentionBackend
    from cuformers.nn.cache import PagedCache

Phase = Literal["full", "decode"]


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
    """[N, max_blocks], int32: pages of each sequence, in order."""
    slots: Tensor
    """[T], int32: where each token's key and value are written; negative writes nothing."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward pass over a flat stream of T tokens from N sequences.

    In phase "full" every sequence's keys are the tokens of this very step: a prompt, a training row, a plain
    forward. In phase "decode" each sequence brings one token, and its keys are in the cache.
    """

    phase: Phase
    """Which keys the tokens attend to."""
    positions: Tensor
    """[T], int32: position of each token in its sequence."""
    lengths: Tensor
    """[N], int32: number of keys of each sequence, this step's tokens included."""
    cu_seqlens: Tensor | None = None
    """[N + 1], int32: where each sequence begins in the stream (phase "full")."""
    query_lengths: tuple[int, ...] | None = None
    """Tokens of each sequence as host integers; None where only the device knows them, as in a captured graph."""
    longest: int = 1
    """Tokens of the longest sequence of the stream, or a bound on it where only the device knows."""
    backend: "AttentionBackend | None" = None
    """Computes attention over the stream (phase "full")."""
    cache: CacheView | None = None
    """The paged cache; None where nothing is kept."""
    rope: Mapping[str, RopeRows | None] | None = None
    """Rotary factors by the name that layers ask for; filled in by the decoder."""

    @property
    def uniform(self) -> int | None:
        """The common length S where the stream is a rectangle [N, S]; None where lengths differ or are not known."""
        lengths = self.query_lengths
        return self.longest if lengths and all(n == self.longest for n in lengths) else None


def full_step(
    positions: Tensor, query_lengths: tuple[int, ...], backend: "AttentionBackend", cache: CacheView | None = None
) -> Step:
    """A step whose sequences bring all their keys along.

    Args:
        positions: [T], integer.
        query_lengths: tokens of each sequence, in the stream's order; they sum to T.
        backend: computes attention over the stream.
        cache: where keys and values are kept for later steps.
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
        cache=cache,
    )
