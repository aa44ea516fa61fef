"""Which page holds each block of a request. Plain Python, no torch."""

import sys
from collections.abc import Sequence


def first_seen(window: int | None, position: int, block_size: int) -> int:
    """The first block that a query at `position`, or any later one, sees any key of."""
    return 0 if window is None else max(0, position - window + 1) // block_size


class BlockTables:
    """The pages of one request, which has one for each group of layers and each block of its tokens."""

    def __init__(self, windows: Sequence[int | None] = (), block_size: int = 1) -> None:
        self.pages: list[list[int | None]] = [[] for _ in windows]
        """pages[group][i] is the page of block i; None where it has left the group's window, or was never needed."""
        self.num_blocks = 0
        self.unseen_from = sys.maxsize
        """Position of the first query that no longer sees all the pages."""
        self._windows, self._block_size = windows, block_size
        self._first = [0] * len(windows)
        self._set_unseen_from()

    def append(self, pages: Sequence[int | None]) -> None:
        """Adds a block, with a page for each group."""
        for table, page in zip(self.pages, pages, strict=True):
            table.append(page)
        self.num_blocks += 1

    def block(self, index: int) -> list[int | None]:
        """The pages of a block, one for each group."""
        return [table[index] for table in self.pages]

    def drop_unseen(self, position: int) -> list[int]:
        """Takes out the pages that a query at `position`, or any later one, sees nothing of; the last ones first."""
        dropped: list[int] = []
        for group, window in enumerate(self._windows):
            table, first = self.pages[group], self._first[group]
            seen = min(first_seen(window, position, self._block_size), self.num_blocks)
            if seen > first:
                dropped += [page for page in table[first:seen] if page is not None]
                table[first:seen] = [None] * (seen - first)
                self._first[group] = seen
        self._set_unseen_from()
        return dropped[::-1]

    def _set_unseen_from(self) -> None:
        ends = ((f + 1) * self._block_size for f in self._first)
        self.unseen_from = min((e + w - 1 for e, w in zip(ends, self._windows) if w is not None), default=sys.maxsize)

    def all_pages(self) -> list[int]:
        """Every page, those of the last blocks first."""
        return [page for i in reversed(range(self.num_blocks)) for page in self.block(i) if page is not None]
