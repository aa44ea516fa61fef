"""Copies on the host of the pages of requests that had to give way. Plain Python, no torch."""

from collections.abc import Sequence
from typing import NamedTuple

from cuformers.engine.plan import Swap


class Saved(NamedTuple):
    """What there is of one request."""

    tokens: int
    """Tokens whose keys were computed."""
    places: list[list[int | None]]
    """For each block of them the place of each group's page; None where it had left the window."""


class HostPlaces:
    """Hands out places for copies. A place is free again once its copy is no longer wanted."""

    def __init__(self, num_places: int) -> None:
        self._free = list(range(num_places - 1, -1, -1))

    def save(self, tokens: int, blocks: Sequence[Sequence[int | None]]) -> tuple[Saved | None, list[Swap]]:
        """Places for the pages of these blocks, and what to copy; nothing where there is too little room."""
        count = sum(page is not None for block in blocks for page in block)
        if not tokens or count > len(self._free):
            return None, []
        swaps: list[Swap] = []
        places = [[self._place(page, swaps) for page in block] for block in blocks]
        return Saved(tokens, places), swaps

    def _place(self, page: int | None, swaps: list[Swap]) -> int | None:
        if page is None:
            return None
        swaps.append(Swap(page, self._free.pop()))
        return swaps[-1].place

    def drop(self, saved: Saved) -> None:
        """Takes its places back."""
        self._free += [place for block in saved.places for place in block if place is not None]

    @property
    def num_free(self) -> int:
        """Places without a copy."""
        return len(self._free)
