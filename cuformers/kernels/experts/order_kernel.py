"""(token, choice) pairs sorted by expert, stably, and cut into tiles of one expert each, all on the device.

Few pairs in one kernel: a pair's place is the number of pairs that come before it, and each is compared with all. Many
pairs by a counting sort in three: chunks of pairs are counted, one program adds the counts up, and each chunk puts its
pairs in their places. The number of tiles is the most that any routing can need; those left over have expert -1.
"""

import triton
import triton.language as tl


@triton.jit
def _store_tables(
    bounds_ptr, tiles_ptr, begin, end, num_tiles, E,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """bounds [E + 1] and tiles [num_tiles, 3] from where each expert's places begin and end."""
    expert = tl.arange(0, BLOCK_E)
    tl.store(bounds_ptr + expert, begin, mask=expert < E)
    tl.store(bounds_ptr + 1 + expert, end, mask=expert == E - 1)
    count = (end - begin + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(count, axis=0)  # tiles of this expert and those before it
    first = last - count
    for start in tl.range(0, num_tiles, SPAN):
        tile = start + tl.arange(0, SPAN)
        mine = (first[None, :] <= tile[:, None]) & (tile[:, None] < last[None, :])
        found = tl.sum(tl.where(mine, expert[None, :] + 1, 0), axis=1) - 1
        place = begin[None, :] + (tile[:, None] - first[None, :]) * BLOCK_M
        place = tl.sum(tl.where(mine, place, 0), axis=1)
        stop = tl.minimum(place + BLOCK_M, tl.sum(tl.where(mine, end[None, :], 0), axis=1))
        inside = tile < num_tiles
        tl.store(tiles_ptr + tile * 3, found, mask=inside)
        tl.store(tiles_ptr + tile * 3 + 1, place, mask=inside)
        tl.store(tiles_ptr + tile * 3 + 2, stop, mask=inside)


@triton.jit(do_not_specialize=["P", "num_tiles"])
def rank_kernel(
    ids_ptr, order_ptr, places_ptr, bounds_ptr, tiles_ptr, P, num_tiles, E,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [1 + blocks of SPAN pairs]: the first program makes bounds and tiles, each other one places its pairs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    wide = tl.arange(0, WIDE)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, BLOCK_E)
        begin, end = tl.zeros((BLOCK_E,), dtype=tl.int32), tl.zeros((BLOCK_E,), dtype=tl.int32)
        for start in tl.range(0, P, WIDE):
            chosen = tl.load(ids_ptr + start + wide, mask=start + wide < P, other=BLOCK_E)[:, None]
            begin += tl.sum((chosen < expert[None, :]).to(tl.int32), axis=0)
            end += tl.sum((chosen <= expert[None, :]).to(tl.int32), axis=0)
        _store_tables(bounds_ptr, tiles_ptr, begin, end, num_tiles, E, BLOCK_M, BLOCK_E, SPAN)
    else:
        pair = (tl.program_id(0) - 1) * SPAN + tl.arange(0, SPAN)
        key = tl.load(ids_ptr + pair, mask=pair < P, other=0) * P + pair  # no two are equal
        place = tl.zeros((SPAN,), dtype=tl.int32)
        for start in tl.range(0, P, WIDE):
            other = start + wide
            before = tl.load(ids_ptr + other, mask=other < P, other=BLOCK_E) * P + other
            place += tl.sum((before[None, :] < key[:, None]).to(tl.int32), axis=1)
        tl.store(order_ptr + place, pair, mask=pair < P)
        tl.store(places_ptr + pair, place, mask=pair < P)


@triton.jit
def _chosen(ids_ptr, pair, P, BLOCK_E: tl.constexpr):
    """[pairs, BLOCK_E], 1 where the pair is the expert's."""
    chosen = tl.load(ids_ptr + pair, mask=pair < P, other=-1)
    return (chosen[:, None] == tl.arange(0, BLOCK_E)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["P"])
def count_kernel(
    ids_ptr, counts_ptr, P, CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):
    """Grid [chunks]: how many of a chunk's pairs each expert has, counts [chunks, BLOCK_E]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for start in tl.static_range(0, CHUNK, STEP):
        pair = chunk * CHUNK + start + tl.arange(0, STEP)
        counts += tl.sum(_chosen(ids_ptr, pair, P, BLOCK_E), axis=0)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=["chunks", "num_tiles"])
def tile_kernel(
    counts_ptr, before_ptr, bounds_ptr, tiles_ptr, chunks, num_tiles, E,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: where each expert's pairs begin (bounds [E + 1]), how many of them earlier chunks have
    (before [chunks, BLOCK_E]), and the tiles [num_tiles, 3]: expert, first place, end."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.arange(0, BLOCK_E)
    line = tl.arange(0, SPAN)
    total = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for chunk in tl.range(0, chunks, SPAN):
        at = (chunk + line)[:, None] * BLOCK_E + expert[None, :]
        inside = (chunk + line < chunks)[:, None]
        counts = tl.load(counts_ptr + at, mask=inside, other=0)
        tl.store(before_ptr + at, tl.cumsum(counts, axis=0) - counts + total[None, :], mask=inside)
        total += tl.sum(counts, axis=0)
    end = tl.cumsum(total, axis=0)
    _store_tables(bounds_ptr, tiles_ptr, end - total, end, num_tiles, E, BLOCK_M, BLOCK_E, SPAN)


@triton.jit(do_not_specialize=["P"])
def place_kernel(
    ids_ptr, before_ptr, bounds_ptr, order_ptr, places_ptr, P, E,
    CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [chunks]: order [P] says which pair is at a place, places [P] where a pair is."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    following = tl.load(bounds_ptr + expert, mask=expert < E, other=0)
    following += tl.load(before_ptr + chunk * BLOCK_E + expert)
    for start in tl.static_range(0, CHUNK, STEP):
        pair = chunk * CHUNK + start + tl.arange(0, STEP)
        chosen = _chosen(ids_ptr, pair, P, BLOCK_E)
        place = following[None, :] + tl.cumsum(chosen, axis=0) - chosen
        place = tl.sum(place * chosen, axis=1)
        tl.store(order_ptr + place, pair, mask=pair < P)
        tl.store(places_ptr + pair, place, mask=pair < P)
        following += tl.sum(chosen, axis=0)
