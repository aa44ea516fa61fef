"""Who holds which page of the cache. Plain Python, no torch."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol


class Keeper(Protocol):
    """Remembers what a page holds, so that it may be used again after its holders have left."""

    def lose(self, page: int) -> None:
        """The page is about to be overwritten."""
        ...


class BlockPool:
    """Pages with counted holders.

    A page that nobody holds is free, or cached where it has a keeper. Free pages are handed out first, then cached
    ones, those that were given back longest ago first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._keepers: list[Keeper | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that nobody holds and whose content nobody knows."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds, but whose content is known."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `take` can hand out."""
        return len(self._free) + len(self._cached)

    def take(self) -> int:
        """A page with one holder and unknown content."""
        assert self.num_available, "a page was taken where there is none"
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            keeper, self._keepers[page] = self._keepers[page], None
            assert keeper is not None, "a cached page has a keeper"
            keeper.lose(page)
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held or cached."""
        if not self._holders[page]:
            del self._cached[page]
        self._holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder less of each page; of those that become cached, the first ones go first."""
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} came back more often than it was handed out"
            if self._holders[page]:
                continue
            if self._keepers[page] is None:
                self._free.append(page)
            else:
                self._cached[page] = None

    def held(self, page: int) -> bool:
        """Whether anyone holds it."""
        return self._holders[page] > 0

    def keep(self, page: int, keeper: Keeper) -> None:
        """Makes a held page one that stays cached after its last holder."""
        assert self._holders[page] and self._keepers[page] is None, f"page {page} is not held, or kept already"
        self._keepers[page] = keeper

    def forget(self) -> None:
        """No page's content is known any more."""
        self._keepers = [None] * self.num_blocks
        self._free.extend(self._cached)
        self._cached.clear()
