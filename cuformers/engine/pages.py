"""Who owns which page of the cache. Plain Python, no torch."""


class PageAllocator:
    """Hands out pages of the cache. Every page is either free or owned by exactly one request."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None where there are not so many."""
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        taken, self._free = self._free[cut:], self._free[:cut]
        return taken[::-1]

    def give_back(self, pages: list[int]) -> None:
        """Frees pages that `take` handed out."""
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.num_pages, "more pages came back than there are"
