"""Pages and the prefix cache: what is kept, what is found, and what goes first."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuformers.engine.blocks import BlockPool
from cuformers.engine.prefix import Cursor, PrefixCache
from cuformers.engine.tables import BlockTables, first_seen


@dataclass
class Remembers:
    """A keeper that notes what it lost."""

    lost: list[int] = field(default_factory=list)

    def lose(self, page: int) -> None:
        self.lost.append(page)


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["take", "keep", "share", "back"]), st.integers(0, 99))))
def test_every_page_is_free_or_cached_or_held(num_blocks: int, moves: list[tuple[str, int]]) -> None:
    pool, keeper = BlockPool(num_blocks), Remembers()
    held: list[int] = []
    kept: set[int] = set()
    for move, pick in moves:
        page = held[pick % len(held)] if held else None
        if move == "take" and pool.num_available:
            taken = pool.take()
            assert taken not in held
            kept.discard(taken)
            held.append(taken)
        elif page is None:
            continue
        elif move == "keep" and page not in kept:
            pool.keep(page, keeper)
            kept.add(page)
        elif move == "share":
            pool.share(page)
            held.append(page)
        elif move == "back":
            pool.give_back([page])
            held.remove(page)
        assert pool.num_cached == len(kept - set(held)) and all(pool.held(page) for page in held)
        assert pool.num_free + pool.num_cached + len(set(held)) == num_blocks
    assert not set(keeper.lost) & (kept - set(keeper.lost))


def test_pages_without_content_go_first_then_the_oldest() -> None:
    pool, keeper = BlockPool(4), Remembers()
    pages = [pool.take() for _ in range(4)]
    for page in pages[:3]:
        pool.keep(page, keeper)
    pool.give_back([pages[1], pages[3], pages[0], pages[2]])
    pool.share(pages[1])  # found again: it has been of use most recently
    pool.give_back([pages[1]])
    assert [pool.take() for _ in range(4)] == [pages[3], pages[0], pages[2], pages[1]]
    assert keeper.lost == [pages[0], pages[2], pages[1]]


def test_a_page_does_not_come_back_twice() -> None:
    pool = BlockPool(1)
    page = pool.take()
    pool.give_back([page])
    with pytest.raises(AssertionError, match="more often"):
        pool.give_back([page])


@pytest.mark.parametrize("window, position, first", [(None, 100, 0), (1, 8, 2), (8, 7, 0), (8, 10, 0), (8, 11, 1)])
def test_the_first_block_that_a_query_sees(window: int | None, position: int, first: int) -> None:
    assert first_seen(window, position, 4) == first


def test_tables_drop_what_has_left_the_window() -> None:
    tables = BlockTables((None, 8), 4)
    for i in range(4):
        tables.append([2 * i, 2 * i + 1])
    assert tables.unseen_from == 11
    assert tables.drop_unseen(10) == []
    assert tables.drop_unseen(15) == [3, 1]
    assert tables.pages == [[0, 2, 4, 6], [None, None, 5, 7]] and tables.unseen_from == 19
    assert tables.all_pages() == [6, 7, 4, 5, 2, 0]


class Filled:
    """A cache that has some chains of blocks, with pages given back tails first."""

    def __init__(self, windows: tuple[int | None, ...], num_blocks: int = 64) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, windows, 4)
        self.groups = len(windows)

    def enter(self, key: str, chain: str) -> list[list[int]]:
        """Enters one block a letter: the pages of each."""
        cursor, blocks = Cursor(self.cache.root(key), 0), []
        for letter in chain:
            blocks.append([self.pool.take() for _ in range(self.groups)])
            cursor.advance((ord(letter),), blocks[-1], self.pool)
        cursor.close()
        for pages in reversed(blocks):
            self.pool.give_back(pages)
        return blocks

    def found(self, key: str, chain: str) -> int:
        return len(self.cache.match(key, [(ord(letter),) for letter in chain]))

    def evict(self, count: int) -> None:
        """Overwrites so many pages with nothing of use."""
        taken = [self.pool.take() for _ in range(self.pool.num_free + count)]
        self.pool.give_back(taken)


def test_a_chain_is_found_by_its_tokens_and_its_root() -> None:
    filled = Filled((None,))
    filled.enter("", "abc")
    filled.enter("", "abd")
    assert [filled.found("", chain) for chain in ("abcd", "abd", "ab", "bc", "xbc")] == [3, 3, 2, 0, 0]
    assert filled.found("salt", "abc") == 0


def test_equal_blocks_are_kept_once() -> None:
    filled = Filled((None,))
    first = filled.enter("", "ab")
    assert filled.enter("", "ab") != first
    assert filled.pool.num_cached == 2, "the second request's pages are free"


def test_tails_are_lost_before_heads() -> None:
    filled = Filled((None,))
    filled.enter("", "abcd")
    filled.evict(1)
    assert filled.found("", "abcd") == 3
    filled.evict(2)
    assert filled.found("", "abcd") == 1


def test_a_lost_block_is_filled_in_again() -> None:
    filled = Filled((None,), 3)
    cursor = Cursor(filled.cache.root(""), 0)
    pages = [filled.pool.take() for _ in range(3)]
    for letter, page in zip("abc", pages):
        cursor.advance((ord(letter),), [page], filled.pool)
    cursor.close()
    filled.pool.give_back(pages)  # heads first, which no request does
    filled.evict(1)
    assert filled.found("", "abc") == 0
    filled.enter("", "a")
    assert filled.found("", "abc") == 3


def test_a_window_needs_only_the_last_blocks() -> None:
    filled = Filled((8,))
    blocks = filled.enter("", "abcde")
    held = [page for pages in blocks[2:] for page in pages]
    for page in held:
        filled.pool.share(page)
    filled.evict(2)
    filled.pool.give_back(held[::-1])
    # The token after block n sees keys of blocks n - 2 and n - 1: of the pages left, only 4 and 5 blocks have both.
    assert [filled.found("", "abcde"[:n]) for n in range(1, 6)] == [0, 0, 0, 4, 5]


def test_nothing_is_found_after_clear() -> None:
    filled = Filled((None, 8))
    filled.enter("", "abc")
    filled.cache.clear()
    assert filled.found("", "abc") == 0 and filled.pool.num_free == filled.pool.num_blocks


def test_the_tree_shrinks_with_its_pages() -> None:
    filled = Filled((None,))
    filled.enter("", "abc")
    filled.enter("salt", "x")
    filled.evict(4)
    assert not filled.cache._top.children
