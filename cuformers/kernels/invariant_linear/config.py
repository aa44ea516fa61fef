"""How an invariant product is cut.

Chunks of K fix a row's bits: they follow from the weight's shape. Tiles do not: a cost model picks them by T. On
Hopper tiles below 64 rows use another tensor-core instruction, which adds in the same order.
"""

from functools import cache
from typing import Literal, NamedTuple

BLOCK_K = 64
"""Columns per step of the K loop, for 2-byte elements."""
CHUNK_STEP = 128
"""Chunks are multiples of this many columns."""
PARTIAL_ROWS = 1024
"""Chunks' sums wait in memory for at most so many rows at once: they should stay in the L2."""


class Tile(NamedTuple):
    """What one program computes."""

    block_m: int
    """Rows of x."""
    block_n: int
    """Outputs."""
    block_n2: int
    """More outputs, in an accumulator of their own; 1 for none. GATED_TILES: the up rows of the same outputs."""
    num_warps: int
    num_stages: int
    """Steps of the K loop in flight, or fewer where shared memory is smaller."""
    per_sm: int
    """Programs that share a multiprocessor."""
    holds_chunks: bool
    """Registers have room for a second set of sums, so that one program can add up the chunks."""

    @property
    def width(self) -> int:
        """Weight rows of a tile."""
        return self.block_n + (self.block_n2 if self.block_n2 > 1 else 0)


class Cut(NamedTuple):
    """How a product is launched."""

    tile: Tile
    then: Literal["done", "sum", "gate"] = "done"
    """What a second kernel does. "sum": chunks are units of their own, and their sums are added. "gate": gate and up
    are stored as one plain product, and the activation follows."""


SMALL_TILES = (
    Tile(16, 32, 1, 4, 8, 4, True),
    Tile(16, 64, 1, 4, 8, 2, True),
    Tile(32, 32, 1, 4, 8, 3, True),
    Tile(32, 64, 1, 4, 6, 3, True),
)
TILES = (
    Tile(64, 16, 1, 4, 8, 2, True),
    Tile(64, 32, 1, 4, 8, 2, True),
    Tile(64, 64, 1, 4, 6, 2, True),
    Tile(64, 128, 1, 4, 4, 2, True),
    Tile(128, 64, 1, 4, 4, 2, True),
    Tile(128, 128, 1, 4, 3, 2, False),
    Tile(128, 128, 1, 8, 6, 1, True),
    Tile(128, 128, 64, 8, 4, 1, False),
    Tile(128, 256, 1, 8, 4, 1, False),
    Tile(256, 128, 64, 8, 4, 1, False),
)
SMALL_GATED_TILES = (
    Tile(16, 16, 16, 4, 8, 4, False),
    Tile(16, 32, 32, 4, 8, 2, False),
    Tile(32, 32, 32, 4, 6, 3, False),
)
GATED_TILES = (
    Tile(64, 16, 16, 4, 8, 2, False),
    Tile(64, 32, 32, 4, 6, 2, False),
    Tile(64, 64, 64, 4, 4, 2, False),
    Tile(128, 64, 64, 4, 3, 2, False),
    Tile(128, 64, 64, 8, 4, 1, False),
    Tile(256, 64, 64, 8, 4, 1, False),
    Tile(128, 128, 128, 8, 4, 1, False),
)
WIDE_DTYPE_TILE = Tile(64, 64, 1, 4, 2, 1, True)
GATED_WIDE_DTYPE_TILE = Tile(64, 32, 32, 4, 2, 1, False)
"""float32 has no tensor cores here: one tile serves every shape."""

SPLITS: dict[tuple[int, int], int] = {}
"""(N, K) -> chunks, where measurement beats the rule. A change here changes bits."""


@cache
def splits(N: int, K: int) -> int:
    """Chunks of K, by the weight's shape [N, K] alone.

    Enough that tiles of 64 outputs by chunks fill most of a large GPU, each chunk being worth a program's start.

    Example:
        >>> splits(4096, 12288), splits(24576, 4096)
        (2, 1)
    """
    found = SPLITS.get((N, K))
    if found is not None:
        return found
    count = 1
    while -(-N // 64) * count < 92 and K // (2 * count) >= 512:
        count *= 2
    return count


def chunk(K: int, count: int) -> int:
    """Columns of a chunk; the last one may be shorter."""
    return -(-K // (count * CHUNK_STEP)) * CHUNK_STEP


@cache
def config(N: int, K: int, T: int, *, count: int, gated: bool, num_sms: int, small: bool = True) -> Cut:
    """The cheapest cut for x [T, K] by a weight of N outputs (2N rows where gated), by `_cost`; see `cuts`."""
    return min(cuts(count, gated=gated, small=small), key=lambda cut: _cost(cut, N, K, T, count, gated, num_sms))


def cuts(count: int, *, gated: bool, small: bool = True) -> tuple[Cut, ...]:
    """All cuts that give the bits of a product of so many chunks; gated products have one.

    Args:
        small: tiles below 64 rows too.
    """
    tiles = (*SMALL_TILES, *TILES) if small else TILES
    if gated:
        own = (*SMALL_GATED_TILES, *GATED_TILES) if small else GATED_TILES
        return (*map(Cut, own), *(Cut(tile, "gate") for tile in tiles))
    if count == 1:
        return tuple(map(Cut, tiles))
    return (*(Cut(tile) for tile in tiles if tile.holds_chunks), *(Cut(tile, "sum") for tile in tiles))


MACS = 2.8e6
"""Multiplications a multiprocessor's tensor cores do in a microsecond."""
L2_BYTES = 60e3
"""Bytes a multiprocessor gets from the L2 in a microsecond."""
LAUNCH = 1.5
"""From a kernel's end to the next one's work."""
START = 2.0
"""From a program's start to its first product, and from its last to its end."""


def _cost(cut: Cut, N: int, K: int, T: int, count: int, gated: bool, num_sms: int) -> float:
    """Microseconds, roughly: the steps of the busiest multiprocessor, each bound by products or by the L2."""
    tile, parts = cut.tile, count if cut.then == "sum" else 1
    units = -(-T // tile.block_m) * -(-N * (1 + gated) // tile.width) * parts
    steps = -(-K // BLOCK_K) / parts
    products = tile.block_m * tile.width * BLOCK_K / MACS
    loads = (min(T, tile.block_m) + tile.width) * BLOCK_K * 2 / L2_BYTES
    waves = -(-units // num_sms)
    starts = -(-units // (num_sms * tile.per_sm))
    # Bytes that the second kernel reads and writes for an output, and the first wrote for it.
    extra = {"done": 0, "sum": 8 * count + 2, "gate": 10}[cut.then]
    then = LAUNCH + T * N * extra / (num_sms * L2_BYTES) if extra else 0.0
    return waves * steps * max(products, loads) + starts * START + then
