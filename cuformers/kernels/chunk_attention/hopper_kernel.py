"""Attention of chunks for capability 9.0: one warp loads, two warpgroups compute, each the rows of half a tile.

The design is FlashAttention-3's (Shah et al., 2024). A warpgroup asks for the scores of a tile before it multiplies
the weights of the tile before with their values, so that its exponentials overlap with a product; and the two
warpgroups take turns at asking, so that one's exponentials overlap with the other's products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

try:
    from triton.experimental.gluon.language import thread_barrier
except ImportError:  # its name from Triton 3.7 on
    from triton.experimental.gluon.language import barrier as thread_barrier

from cuformers.kernels.chunk_attention.hopper_items_kernel import ROWS, keys, queries, rounds
from cuformers.kernels.chunk_attention.hopper_load_kernel import produce, release, ring, wait_full

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _start(turns, half, step):
    """Waits for this warpgroup's turn: the first one goes ahead at once."""
    mbarrier.wait(turns.index(half), (step & 1) ^ (1 - half))


@gluon.jit
def _clean(v, start, low, length, BLOCK_S: gl.constexpr, BLOCK_D: gl.constexpr):
    """Zeroes the values of positions outside [low, length): a weight of zero does not hide NaN."""
    SLICE: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    if (start + BLOCK_S > length) | (start < low):
        for part in gl.static_range(0, BLOCK_S, SLICE):
            # One slice at a time, as registers are scarce here.
            if (start + part + SLICE > length) | (start + part < low):
                rows = v.slice(part, SLICE, 0)
                position = start + part + gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
                keep = (position >= low) & (position < length)
                rows.store(gl.where(keep[:, None], rows.load(LAYOUT), 0.0))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def _weigh(
    s, m, l, own, start, window, scale, softcap,
    BLOCK_S: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(weights, maxima, sums, what earlier results fade by); `scale` carries log2(e) where there is no softcap."""
    if SOFTCAP:
        s = 1.0 - 2.0 / (gl.exp(s * (2.0 * scale / softcap)) + 1.0)
        scale = softcap * LOG2E
    if MASK:
        position = start + gl.arange(0, BLOCK_S, gl.SliceLayout(0, LAYOUT))
        seen = position[None, :] <= own[:, None]
        if WINDOW:
            seen = seen & (position[None, :] > own[:, None] - window)
        s = gl.where(seen, s, -float("inf"))
    top = gl.maximum(m, gl.max(s, axis=1) * scale)
    # A row may have seen nothing yet, but not after a full tile.
    safe = gl.where(top == -float("inf"), 0.0, top) if MASK else top
    p = gl.exp2(s * scale - safe[:, None])
    fade = gl.exp2(m - safe)
    return p, top, l * fade + gl.sum(p, axis=1), fade


@gluon.jit
def _step(
    turns, half, tile, q, p, acc, m, l, k_ring, v_ring, own, start, low, length, window, scale, softcap,
    BLOCK_S: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    MASK: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores and weights of a tile, while the weights p of the tile before meet their values."""
    k = wait_full(k_ring, tile, STAGES)
    _start(turns, half, tile)
    zero = gl.full([ROWS, BLOCK_S], 0.0, gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    # Weights cross the loop in float32: in pairs of 16 bits they would be taken apart and put together again.
    p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    v = wait_full(v_ring, tile - 1, STAGES)
    if MASK:
        _clean(v, start + BLOCK_S, low, length, BLOCK_S, BLOCK_D)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    mbarrier.arrive(turns.index(1 - half))
    s = warpgroup_mma_wait(1, deps=[s])
    release(k_ring, tile, STAGES)
    p, m, l, fade = _weigh(s, m, l, own, start, window, scale, softcap, BLOCK_S, WINDOW, SOFTCAP, MASK, S_LAYOUT)
    # Waits for nothing, but ends a block of code: ptxas would put the next wait before the exponentials.
    wait_full(v_ring, tile - 1, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(v_ring, tile - 1, STAGES)
    return p, acc * gl.convert_layout(fade, gl.SliceLayout(1, O_LAYOUT))[:, None], m, l


@gluon.jit
def _attend(
    turns, half, tile, q, k_ring, v_ring, first, low, last, num, diagonal, full, length, window, scale, softcap,
    G: gl.constexpr, BLOCK_S: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """(outputs, maxima, sums) of an item with `num` tiles, the first of which is number `tile` of the rings."""
    own = first + (half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))) // G
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    l = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.full([ROWS, BLOCK_D], 0.0, gl.float32, O_LAYOUT)
    k = wait_full(k_ring, tile, STAGES)
    _start(turns, half, tile)
    zero = gl.full([ROWS, BLOCK_S], 0.0, gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - half))
    s = warpgroup_mma_wait(0, deps=[s])
    release(k_ring, tile, STAGES)
    p, m, l, _ = _weigh(s, m, l, own, last, window, scale, softcap, BLOCK_S, WINDOW, SOFTCAP, True, S_LAYOUT)
    for i in range(1, num):
        # The first full tile goes with the masked ones: the values before it are those of a tile on the diagonal.
        if (i > diagonal) & (i < full):
            p, acc, m, l = _step(
                turns, half, tile + i, q, p, acc, m, l, k_ring, v_ring, own, last - i * BLOCK_S, low, length, window,
                scale, softcap, BLOCK_S, BLOCK_D, STAGES, WINDOW, SOFTCAP, False, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        else:
            p, acc, m, l = _step(
                turns, half, tile + i, q, p, acc, m, l, k_ring, v_ring, own, last - i * BLOCK_S, low, length, window,
                scale, softcap, BLOCK_S, BLOCK_D, STAGES, WINDOW, SOFTCAP, True, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
    v = wait_full(v_ring, tile + num - 1, STAGES)
    _clean(v, last - (num - 1) * BLOCK_S, low, length, BLOCK_S, BLOCK_D)
    acc = warpgroup_mma(gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2)), v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(v_ring, tile + num - 1, STAGES)
    return acc, m, l


@gluon.jit
def _output(
    acc, m, l, sinks_ptr, head, half,
    G: gl.constexpr, SINKS: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """acc / l, a sink being one more part of l."""
    if SINKS:
        g = (half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))) % G
        sink = gl.load(sinks_ptr + head * G + g).to(gl.float32) * LOG2E
        top = gl.maximum(m, sink)
        fade = gl.exp2(m - top)
        l = l * fade + gl.exp2(sink - top)
        share = fade / l
    else:
        share = 1.0 / gl.where(l == 0.0, 1.0, l)
    return acc * gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT))[:, None]


@gluon.jit
def _consume(
    half, pipes, chunks, inputs,
    HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_S: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of all items of this program."""
    turns, q_tiles, k_ring, v_ring = pipes
    q_ptr, sinks_ptr, out_ptr, q_stride, window, scale, softcap = inputs
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_S, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    IO_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    r = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IO_LAYOUT))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, IO_LAYOUT))
    q = q_tiles.index(half)
    tile = gl.to_tensor(0)
    for turn in range(rounds(chunks[3], chunks[4], HKV, G)):
        head, _, token, end, length = queries(turn, chunks, HKV, G)
        low, last, num, diagonal, full = keys(token, end, length, window, G, BLOCK_S, WINDOW)
        there = (r < 2 * ROWS // G * G) & (token + r // G < end)
        mask = there[:, None] & (d < D)[None, :]
        at = (token + r // G).to(gl.int64)
        within = ((head * G + r % G) * D)[:, None] + d[None, :]
        out_at = out_ptr + (at * (HKV * G * D))[:, None] + within
        if num > 0:
            q.store(gl.load(q_ptr + (at * q_stride)[:, None] + within, mask=mask, other=0.0))
            fence_async_shared()
            thread_barrier()
            acc, m, l = _attend(
                turns, half, tile, q, k_ring, v_ring, length - end + token, low, last, num, diagonal, full, length,
                window, scale, softcap, G, BLOCK_S, BLOCK_D, STAGES, WINDOW, SOFTCAP, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
            out = _output(acc, m, l, sinks_ptr, head, half, G, SINKS, S_LAYOUT, O_LAYOUT).to(dtype)
            gl.store(out_at, gl.convert_layout(out, IO_LAYOUT), mask=mask)
        elif token < end:
            gl.store(out_at, gl.full([ROWS, BLOCK_D], 0.0, dtype, IO_LAYOUT), mask=mask)
        tile += num


@gluon.jit(do_not_specialize=["T", "N", "window", "table_stride"])
def hopper_kernel(
    q_ptr, k_desc, v_desc, tables_ptr, bounds_ptr, rows_ptr, lengths_ptr, sinks_ptr, out_ptr,
    T, N, q_stride, table_stride, k_rows, v_rows, scale, softcap, window,
    HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_S: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid [programs], as many as run at once. Launched with 4 warps, those of the first warpgroup."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_D], gl.NVMMASharedLayout(128, 16, 2))
    k_ring = ring(dtype, BLOCK_S, BLOCK_D, STAGES)
    v_ring = ring(dtype, BLOCK_S, BLOCK_D, STAGES)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    chunks = (bounds_ptr, rows_ptr, lengths_ptr, T, N)
    pipes = (turns, q_tiles, k_ring, v_ring)
    inputs = (q_ptr, sinks_ptr, out_ptr, q_stride, window, scale, softcap)
    cache = (k_desc, v_desc, tables_ptr, table_stride, k_rows, v_rows, window)
    gl.warp_specialize(
        [
            (_consume, (0, pipes, chunks, inputs, HKV, G, D, BLOCK_D, BLOCK_S, STAGES, WINDOW, SOFTCAP, SINKS)),
            (_consume, (1, pipes, chunks, inputs, HKV, G, D, BLOCK_D, BLOCK_S, STAGES, WINDOW, SOFTCAP, SINKS)),
            (produce, (k_ring, v_ring, chunks, cache, HKV, G, PAGE, BLOCK_S, BLOCK_D, STAGES, WINDOW)),
        ],
        [4, 1],
        [240, 24],
    )
