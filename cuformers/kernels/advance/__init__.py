"""advance: takes the sampled tokens into the decode state, so that the next step needs nothing from the host.

    advance(sampled [R] int64, state, rows [R] int32 | None) -> None, in place

Sampled token r goes to row `rows[r]` of the `DecodeState`, be it idle (its prompt has just been computed) or busy; a
negative row takes nothing. Without rows, token r goes to row r where that is busy.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from cuformers.kernels.op import two_ways


class DecodeState(NamedTuple):
    """What the next decode step reads, one row a sequence. A row of length 0 is idle."""

    tokens: Tensor
    """[B], int64: the token that each row feeds to the model."""
    positions: Tensor
    """[B], int32: position of that token; of a prompt's last token while the prompt is being computed."""
    lengths: Tensor
    """[B], int32: keys each row attends to, that token included; 0 for idle rows."""
    slots: Tensor
    """[G, B], int32: where that token's key and value go in the cache, by group of layers; -1 for idle rows."""
    limits: Tensor
    """[B], int32: total length at which a row ends."""
    block_tables: Tensor
    """[G, B, M], int32: pages of each row, by group of layers."""
    history: Tensor
    """[B, L], int32: prompt and generated tokens of each row, from the left."""
    eos: Tensor
    """[B, E], int64: tokens that end a row, filled up with -1."""
    page_size: int
    """Tokens of a page."""

    def rows(self, start: int, stop: int) -> "DecodeState":
        """The state of some rows, as views."""
        return self._replace(**{name: x.narrow(_row_dim(name), start, stop - start) for name, x in self.tensors()})

    def picked(self, index: Tensor) -> "DecodeState":
        """A copy of the state of the rows at `index` [n], int64."""
        return self._replace(**{name: x.index_select(_row_dim(name), index) for name, x in self.tensors()})

    def move(self, source: Tensor, target: Tensor) -> None:
        """Rows `target` [n], int64, become what rows `source` were, which become idle; no row is in both."""
        for name, x in self.tensors():
            dim = _row_dim(name)
            x.index_copy_(dim, target, x.index_select(dim, source))
        self.idle(source)

    def idle(self, index: Tensor) -> None:
        """Rows `index` [n], int64, become idle."""
        self.lengths.index_fill_(0, index, 0)
        self.slots.index_fill_(1, index, -1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors by name."""
        return ((name, x) for name, x in self._asdict().items() if isinstance(x, Tensor))


def _row_dim(name: str) -> int:
    return 1 if name in ("slots", "block_tables") else 0


OP = two_ways(__name__, "advance")
