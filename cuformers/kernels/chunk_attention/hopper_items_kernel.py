"""Which piece of work comes when, for the kernel of capability 9.0.

An item is one kv head and a tile of queries of one chunk, as in `kernel.py`. Items go out from the last, because those
late in a sequence are long, and in every other round the other way round, which evens out what programs get.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)
"""Rows of a warpgroup: (query, query head of the kv head's group) pairs. A tile has twice as many."""


@gluon.jit
def rounds(T, N, HKV: gl.constexpr, G: gl.constexpr):
    """Items of a program at the most: each loops over as many, some of which may be nothing."""
    return gl.cdiv((T // (2 * ROWS // G) + N + 1) * HKV, gl.num_programs(0))


@gluon.jit
def _chunk_of_tile(bounds_ptr, N, tile, BLOCK_Q: gl.constexpr):
    """The chunk that a tile is in: chunk n starts at tile bounds[n] // BLOCK_Q + n; padding is chunk N."""
    low = gl.to_tensor(0)
    high = N
    while low < high:
        middle = (low + high + 1) // 2
        before = gl.load(bounds_ptr + middle) // BLOCK_Q + middle > tile
        high = gl.where(before, middle - 1, high)
        low = gl.where(before, low, middle)
    return low


@gluon.jit
def queries(turn, chunks, HKV: gl.constexpr, G: gl.constexpr):
    """This program's item of a round: (kv head, row of the tables, first query, end of its chunk, sequence's length).

    The first query is the end of the chunk, or after it, where there is no item.
    """
    bounds_ptr, rows_ptr, lengths_ptr, T, N = chunks
    BLOCK_Q: gl.constexpr = 2 * ROWS // G
    programs = gl.num_programs(0)
    lane = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    item = (T // BLOCK_Q + N + 1) * HKV - 1 - turn * programs - lane
    tile = item // HKV
    n = _chunk_of_tile(bounds_ptr, N, tile, BLOCK_Q)
    chunk = gl.load(bounds_ptr + n)
    end = gl.where(n < N, gl.load(bounds_ptr + n + 1, mask=n < N, other=0), T)
    token = gl.where(item < 0, end, chunk + (tile - (chunk // BLOCK_Q + n)) * BLOCK_Q)
    row = gl.load(rows_ptr + n, mask=n < N, other=0)
    return item % HKV, row, token, end, gl.load(lengths_ptr + n, mask=n < N, other=0)


@gluon.jit
def keys(token, end, length, window, G: gl.constexpr, BLOCK_S: gl.constexpr, WINDOW: gl.constexpr):
    """Keys of an item: (lowest, start of the last tile, tiles, end of the diagonal's tiles, end of full tiles).

    Tiles count from the last to the first: those on the diagonal, the full ones, of which every query sees all, and
    those on the window's edge. Padding has none.
    """
    first = length - end + token
    stop = gl.minimum(first + 2 * ROWS // G, length)
    last = (stop - 1) // BLOCK_S * BLOCK_S
    low = gl.to_tensor(0)
    full = gl.to_tensor(0)
    if WINDOW:
        low = gl.maximum(first + 1 - window, 0)
        full = (gl.maximum(stop - window, 0) + BLOCK_S - 1) // BLOCK_S * BLOCK_S
    num = gl.where((stop > 0) & (token < end), (last - low // BLOCK_S * BLOCK_S) // BLOCK_S + 1, 0)
    diagonal = (last - gl.minimum(gl.maximum(first + 1, 0), stop) // BLOCK_S * BLOCK_S) // BLOCK_S + 1
    return low, last, num, diagonal, gl.minimum((last - full) // BLOCK_S + 1, num)
