"""advance: takes the sampled tokens into the decode state, so that the next step needs nothing from the host.

    advance(sampled, state) -> None, in place

sampled is [B], int64; `state` is a `DecodeState` of B rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.kernels.op import FLOATS, Implementation, Op


class DecodeState(NamedTuple):
    """What the next decode step reads, one row a sequence. A row of length 0 is idle."""

    tokens: Tensor
    """[B], int64: the token that each row feeds to the model."""
    positions: Tensor
    """[B], int32: position of that token."""
    lengths: Tensor
    """[B], int32: keys each row attends to, that token included; 0 for idle rows."""
    slots: Tensor
    """[B], int32: where that token's key and value go in the cache; -1 for idle rows."""
    limits: Tensor
    """[B], int32: total length at which a row ends."""
    block_tables: Tensor
    """[B, M], int32: pages of each row."""
    history: Tensor
    """[B, L], int32: prompt and generated tokens of each row, from the left."""
    eos: Tensor
    """[B, E], int64: tokens that end a row, filled up with -1."""
    page_size: int
    """Tokens of a page."""

    def rows(self, start: int, stop: int) -> "DecodeState":
        """The state of some rows, as views."""
        return self._replace(**{name: x[start:stop] for name, x in self._tensors()})

    def picked(self, index: Tensor) -> "DecodeState":
        """A copy of the state of the rows at `index` [n], int64."""
        return self._replace(**{name: x[index] for name, x in self._tensors()})

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, x) for name, x in self._asdict().items() if isinstance(x, Tensor))


def _reference():
    from cuformers.kernels.advance.reference import advance

    return advance


def _triton():
    from cuformers.kernels.advance.triton import advance

    return advance


OP = Op(
    "advance",
    (
        Implementation(name="triton", load=_triton, modes=frozenset({"infer"}), dtypes=FLOATS, min_capability=(8, 0)),
        Implementation(name="reference", load=_reference, dtypes=FLOATS | {torch.float64}),
    ),
)
