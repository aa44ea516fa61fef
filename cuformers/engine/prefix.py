"""Finds pages whose keys were computed for the same tokens before. Plain Python, no torch.

A tree: each node is a block of tokens after the blocks of its parents, found by comparing the tokens themselves, so
that no two prefixes are ever taken for one another. Below the top, a root each keeps apart what must not be shared.
"""

from collections.abc import Hashable, Iterable, Sequence

from cuformers.engine.blocks import BlockPool
from cuformers.engine.tables import first_seen

Tokens = tuple[int, ...]


class Node:
    """A block of tokens, and for each group the page with their keys, if there is one.

    It stays while it has pages, children, or a cursor on it.
    """

    __slots__ = ("children", "cursors", "key", "pages", "parent")

    def __init__(self, parent: "Node | None", key: Hashable, num_groups: int) -> None:
        self.parent, self.key = parent, key
        self.pages: list[int | None] = [None] * num_groups
        self.children: dict[Hashable, Node] = {}
        self.cursors = 0

    def child(self, key: Hashable) -> "Node":
        """The node below with this key, made where there is none."""
        node = self.children.get(key)
        if node is None:
            node = self.children[key] = Node(self, key, len(self.pages))
        return node

    @property
    def has_pages(self) -> bool:
        """Whether any group's keys are there."""
        return any(page is not None for page in self.pages)

    def lose(self, page: int) -> None:
        """One of its pages is about to be overwritten."""
        self.pages[self.pages.index(page)] = None
        self.prune()

    def prune(self) -> None:
        """Takes itself out of the tree if it is of no use, and then those above that were there for it only."""
        node = self
        while node.parent is not None and not (node.children or node.cursors or node.has_pages):
            del node.parent.children[node.key]
            node = node.parent


class Cursor:
    """How far the blocks of one request are in the tree."""

    __slots__ = ("node", "num_blocks")

    def __init__(self, node: Node, num_blocks: int) -> None:
        self.node, self.num_blocks = node, num_blocks
        node.cursors += 1

    def advance(self, tokens: Tokens, pages: Sequence[int | None], pool: BlockPool) -> None:
        """Enters the next block. Where the tree has pages for it already, they stay, and the request's own are private.

        Args:
            tokens: of the block.
            pages: that hold, or will hold before any later step, their keys; None where the request has none.
            pool: the pages are from.
        """
        above, node = self.node, self.node.child(tokens)
        for group, page in enumerate(pages):
            if page is not None and node.pages[group] is None:
                node.pages[group] = page
                pool.keep(page, node)
        node.cursors += 1
        self.node, self.num_blocks = node, self.num_blocks + 1
        above.cursors -= 1

    def close(self) -> None:
        """Leaves the tree."""
        self.node.cursors -= 1
        self.node.prune()


class PrefixCache:
    """The tree over one pool of pages."""

    def __init__(self, pool: BlockPool, windows: Sequence[int | None], block_size: int) -> None:
        self._pool, self._windows, self._block_size = pool, windows, block_size
        self._top = Node(None, None, len(windows))

    def root(self, key: Hashable) -> Node:
        """Where requests of this key begin; only those share pages."""
        return self._top.child(key)

    def match(self, key: Hashable, blocks: Iterable[Tokens]) -> list[Node]:
        """The longest chain of the first blocks from which a request can go on.

        All its pages are there in groups that see everything; in the others, those that the next token sees.
        """
        nodes: list[Node] = []
        above, usable = self._top.children.get(key), 0
        runs = [0] * len(self._windows)  # of blocks with a page, up to the current one
        for tokens in blocks:
            node = above and above.children.get(tokens)
            if node is None:
                break
            above = node
            nodes.append(node)
            runs = [run + 1 if page is not None else 0 for run, page in zip(runs, node.pages)]
            lacks = [run < len(nodes) - first for run, first in zip(runs, self.first_seen(len(nodes)))]
            if not any(lacks):
                usable = len(nodes)
            elif any(lack and window is None for lack, window in zip(lacks, self._windows)):
                break
        return nodes[:usable]

    def first_seen(self, num_blocks: int) -> list[int]:
        """For each group the first block that the token after `num_blocks` blocks sees any key of."""
        return [first_seen(window, num_blocks * self._block_size, self._block_size) for window in self._windows]

    def clear(self) -> None:
        """Nothing that was cached is ever found again. Cursors are left in a tree that nobody reads: close them."""
        self._pool.forget()
        self._top = Node(None, None, len(self._windows))
