"""Gives requests their pages and finds what the cache has for them. Plain Python, no torch."""

from collections.abc import Sequence
from typing import NamedTuple

from cuformers.engine.blocks import BlockPool
from cuformers.engine.job import Job
from cuformers.engine.plan import Swap, TableEntry
from cuformers.engine.prefix import Cursor, Node, PrefixCache
from cuformers.engine.request import Request
from cuformers.engine.saved import Saved
from cuformers.engine.tables import BlockTables


class Hit(NamedTuple):
    """What the cache has for a request."""

    nodes: list[Node]
    """The blocks it can go on from."""
    pages: list[list[int | None]]
    """For each of them its pages by group; None where the request needs none."""


class BlockManager:
    """The pages of all running requests, out of one pool."""

    def __init__(
        self, *, num_blocks: int, block_size: int, windows: Sequence[int | None], prefix_cache: bool
    ) -> None:
        self.block_size, self.windows = block_size, tuple(windows)
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, self.windows, block_size) if prefix_cache else None

    @property
    def num_groups(self) -> int:
        """Pages of a new block."""
        return len(self.windows)

    def blocks(self, tokens: int) -> int:
        """Blocks that so many tokens fill, the last one maybe in part."""
        return -(-tokens // self.block_size)

    def most_pages(self, tokens: int, ahead: int) -> int:
        """Pages that a request of so many tokens holds at the most, if it is computed a token at a time.

        Args:
            tokens: that the pages are for.
            ahead: tokens after a query for which there are pages already.
        """
        blocks = self.blocks(tokens)
        seen = (blocks if w is None else min(blocks, self.blocks(w - 1 + ahead) + 1) for w in self.windows)
        return sum(seen)

    def find(self, request: Request) -> Hit:
        """The longest part of a waiting request's context that the cache has, its last token excepted."""
        if self.cache is None or not request.cache_prompt:
            return Hit([], [])
        count = (request.total - 1) // self.block_size
        nodes = self.cache.match(_key(request), (self._tokens(request, i) for i in range(count)))
        first = self.cache.first_seen(len(nodes))
        return Hit(nodes, [[p if i >= f else None for p, f in zip(n.pages, first)] for i, n in enumerate(nodes)])

    def num_held(self, hit: Hit) -> int:
        """Pages of a hit that others hold, so that they cost nothing."""
        return sum(self.pool.held(page) for block in hit.pages for page in block if page is not None)

    def open(self, job: Job, hit: Hit) -> None:
        """Begins a request's tables with what the cache has."""
        request, job.tables = job.request, BlockTables(self.windows, self.block_size)
        for block in hit.pages:
            for page in block:
                if page is not None:
                    self.pool.share(page)
            job.tables.append(block)
        request.tables, request.computed = job.tables.pages, len(hit.nodes) * self.block_size
        if self.cache is not None:
            node = hit.nodes[-1] if hit.nodes else self.cache.root(_key(request))
            job.cursor = Cursor(node, len(hit.nodes))

    def restore(self, job: Job, saved: Saved) -> list[Swap]:
        """Gives a request that has just been opened pages for what was saved of it: what to copy to them."""
        swaps: list[Swap] = []
        for block in saved.places:
            pages = [None if place is None else self.pool.take() for place in block]
            job.tables.append(pages)
            swaps += [Swap(page, place) for page, place in zip(pages, block) if page is not None and place is not None]
        job.request.computed = saved.tokens
        return swaps

    def grow(self, job: Job, tokens: int) -> list[TableEntry]:
        """Gives a request new pages, so that it has some for so many tokens."""
        entries = []
        for index in range(job.tables.num_blocks, self.blocks(tokens)):
            pages = [self.pool.take() for _ in self.windows]
            job.tables.append(pages)
            entries += [TableEntry(group, job.request.row, index, page) for group, page in enumerate(pages)]
        return entries

    def drop_unseen(self, job: Job, position: int) -> None:
        """Frees the pages that no query of a request at `position`, or later, sees."""
        self.pool.give_back(job.tables.drop_unseen(position))

    def register(self, job: Job, tokens: int) -> None:
        """Lets others find the full blocks among a request's first `tokens` tokens, whose keys have been launched."""
        cursor = job.cursor
        if cursor is None:
            return
        while (cursor.num_blocks + 1) * self.block_size <= tokens:
            index = cursor.num_blocks
            cursor.advance(self._tokens(job.request, index), job.tables.block(index), self.pool)

    def close(self, job: Job) -> None:
        """Takes back all that a request has."""
        self.leave_cache(job)
        self.pool.give_back(job.tables.all_pages())
        job.tables = BlockTables()
        job.request.tables = job.tables.pages

    def leave_cache(self, job: Job) -> None:
        """Enters no more blocks of a request in the cache."""
        if job.cursor is not None:
            job.cursor.close()
            job.cursor = None

    def forget(self, running: Sequence[Job]) -> None:
        """Makes everything that the cache has unknown, and what these requests compute too."""
        if self.cache is not None:
            for job in running:
                self.leave_cache(job)
            self.cache.clear()

    def _tokens(self, request: Request, index: int) -> tuple[int, ...]:
        start, split = index * self.block_size, len(request.prompt)
        stop = start + self.block_size
        if stop <= split:
            return tuple(request.prompt[start:stop])
        return (*request.prompt[start:], *request.generated[max(start - split, 0) : stop - split])


def _key(request: Request) -> tuple[str, str, bool]:
    past = request.breakpoint is not None and request.total >= request.breakpoint
    return request.cache_salt, request.adapter, past
