"""Rings of tiles in shared memory: one warp fills them by TMA, the warpgroups of `hopper_kernel.py` empty them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from cuformers.kernels.chunk_attention.hopper_items_kernel import keys, queries, rounds

COLUMNS = gl.constexpr(64)
"""Columns of a TMA box: what a swizzle of 128 bytes spans."""


@gluon.jit
def ring(dtype: gl.constexpr, BLOCK_S: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """(tiles [STAGES, BLOCK_S, BLOCK_D], barriers "full", barriers "empty"): two warpgroups empty a tile."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_S, BLOCK_D], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return tiles, full, empty


@gluon.jit
def wait_full(ring, tile, STAGES: gl.constexpr):
    """Waits for a tile; returns its memory."""
    tiles, full, _ = ring
    mbarrier.wait(full.index(tile % STAGES), tile // STAGES & 1)
    return tiles.index(tile % STAGES)


@gluon.jit
def release(ring, tile, STAGES: gl.constexpr):
    """Says that this warpgroup needs a tile no more."""
    mbarrier.arrive(ring[2].index(tile % STAGES))


@gluon.jit
def _load(
    ring, tile, desc, table_ptr, start, cache_rows, head, length,
    PAGE: gl.constexpr, BLOCK_S: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Asks for the tile of positions start.. once its place is free, in boxes that lie in one page each."""
    PART: gl.constexpr = PAGE if PAGE < BLOCK_S else BLOCK_S
    tiles, full, empty = ring
    stage = tile % STAGES
    mbarrier.wait(empty.index(stage), (tile // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), BLOCK_S * BLOCK_D * 2)
    for part in gl.static_range(BLOCK_S // PART):
        at = start + part * PART
        page = gl.load(table_ptr + at // PAGE, mask=at < length, other=0)
        row = page * cache_rows + head * PAGE + at % PAGE
        for column in gl.static_range(0, BLOCK_D, COLUMNS):
            box = tiles.index(stage).slice(part * PART, PART, 0).slice(column, COLUMNS, 1)
            tma.async_copy_global_to_shared(desc, [row, column], full.index(stage), box)


@gluon.jit
def produce(
    k_ring, v_ring, chunks, cache,
    HKV: gl.constexpr, G: gl.constexpr, PAGE: gl.constexpr, BLOCK_S: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Loads the keys and values of all items of this program; `k_rows` and `v_rows` are rows of D from page to page."""
    k_desc, v_desc, tables_ptr, table_stride, k_rows, v_rows, window = cache
    tile = gl.to_tensor(0)
    for turn in range(rounds(chunks[3], chunks[4], HKV, G)):
        head, row, token, end, length = queries(turn, chunks, HKV, G)
        _, last, num, _, _ = keys(token, end, length, window, G, BLOCK_S, WINDOW)
        table_ptr = tables_ptr + row.to(gl.int64) * table_stride
        for i in range(num):
            start = last - i * BLOCK_S
            _load(k_ring, tile, k_desc, table_ptr, start, k_rows, head, length, PAGE, BLOCK_S, BLOCK_D, STAGES)
            _load(v_ring, tile, v_desc, table_ptr, start, v_rows, head, length, PAGE, BLOCK_S, BLOCK_D, STAGES)
            tile += 1
