"""Products whose rows have the same bits however many rows there are.

Each output is one fixed sequence of float32 operations: the K columns are cut into SPLITS chunks, a number that
depends on the weight's shape alone; within a chunk the tensor cores accumulate 16 columns after 16 from zero on; the
chunks' sums are added in order. Tiles, warps and stages are free: they decide which program computes an output, not
how. A chunk's sums may wait in memory ("partial", summed by `sum_kernel`) or in registers. Gate and up are rounded to
the dtype before the activation, so that it may follow in a kernel of its own. Compiled without floating-point
contraction, so that no compiler's choice enters the epilogue.
"""

import triton
import triton.language as tl

from cuformers.kernels.activation_triton import activate


@triton.jit
def _load(src, row, col, rows, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """[BLOCK, BLOCK_K] of a matrix [rows, K] from (row, col) on, zero outside; `src` is a descriptor where TMA."""
    if TMA:
        return src.load([row, col])
    else:
        r = row + tl.arange(0, BLOCK)
        k = col + tl.arange(0, BLOCK_K)
        at = src + r.to(tl.int64)[:, None] * K + k[None, :]
        return tl.load(at, mask=(r < rows)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _ask_for(ptr, row, col, rows, K, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Asks the L2 for rows row.. and columns col.. of a matrix [rows, K] of 2-byte elements, by lines of 128 bytes."""
    r = tl.minimum(row + tl.arange(0, BLOCK), rows - 1)
    k = tl.minimum(col + tl.arange(0, COLUMNS // 64) * 64, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr + r.to(tl.int64)[:, None] * K + k[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _multiply(acc, x, w, UPCAST: tl.constexpr):
    """acc [BLOCK_M, BLOCK] + x [BLOCK_M, BLOCK_K] @ w [BLOCK, BLOCK_K]^T."""
    if UPCAST:
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, w.T, acc, input_precision="ieee")


@triton.jit
def _chunk(
    x, w, w2, m, n, n2, start, end, T, rows, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_N2: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Sums over columns start..end: rows m on of x by weight rows n on, and by weight rows n2 on."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc2 = tl.zeros((BLOCK_M, BLOCK_N2), dtype=tl.float32)
    for k in tl.range(start, end, BLOCK_K):
        a = _load(x, m, k, T, K, BLOCK_M, BLOCK_K, TMA)
        acc = _multiply(acc, a, _load(w, n, k, rows, K, BLOCK_N, BLOCK_K, TMA), UPCAST)
        if BLOCK_N2 > 1:
            acc2 = _multiply(acc2, a, _load(w2, n2, k, rows, K, BLOCK_N2, BLOCK_K, TMA), UPCAST)
    return acc, acc2


@triton.jit
def _biased(acc, bias_ptr, n, rows, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    if BIAS:
        col = n + tl.arange(0, BLOCK)
        acc += tl.load(bias_ptr + col, mask=col < rows, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _rounded(acc, y_ptr):
    return acc.to(y_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _finish(
    acc, residual_ptr, y_ptr, m, n, T, N, scale,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Stores acc * scale + residual as a tile of y [T, N]."""
    row = m + tl.arange(0, BLOCK_M)
    col = n + tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * N + col[None, :]
    inside = (row < T)[:, None] & (col < N)[None, :]
    acc = acc * scale
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _place(unit, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(tile along rows, tile along outputs) of a unit: GROUP tiles of rows by all outputs, rows first, for the L2."""
    group = unit // (GROUP * tiles_n)
    first = group * GROUP
    size = min(tiles_m - first, GROUP)
    inner = unit % (GROUP * tiles_n)
    return first + inner % size, inner // size


@triton.jit(do_not_specialize=["T", "chunk"])
def product_kernel(
    x_ptr, w_ptr, w2_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, T, N, K, chunk, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_N2: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, PARTIAL: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, N] of x [T, K]. PARTIAL: the sums of each chunk instead, y [SPLITS, T, N] float32, nothing riding along.

    A tile has BLOCK_N outputs, and BLOCK_N2 more where that is above 1: with an ACTIVATION other than "none" those are
    the up rows of a weight [2N, K], gate rows first; else they follow the first, so that tiles need be no power of two.
    x_ptr, w_ptr and w2_ptr (the weight again) are tensor descriptors where TMA. The first AHEAD columns of the weight
    are on their way to the L2 while the kernel before still runs.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION != "none"
    WIDTH: tl.constexpr = BLOCK_N if GATED or BLOCK_N2 == 1 else BLOCK_N + BLOCK_N2
    rows = 2 * N if GATED else N
    tiles_m = tl.cdiv(T, BLOCK_M)
    tiles_n = tl.cdiv(N, WIDTH)
    tiles = tiles_m * tiles_n
    units = tiles * SPLITS if PARTIAL else tiles
    if PDL:
        if AHEAD > 0:
            unit = tl.program_id(0)
            n = _place(unit % tiles, tiles_m, tiles_n, GROUP)[1] * WIDTH
            start = unit // tiles * chunk
            _ask_for(weight_ptr, n, start, rows, K, BLOCK_N, AHEAD)
            if BLOCK_N2 > 1:
                _ask_for(weight_ptr, n + N if GATED else n + BLOCK_N, start, rows, K, BLOCK_N2, AHEAD)
        tl.extra.cuda.gdc_wait()
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0)):
        tile_m, tile_n = _place(unit % tiles, tiles_m, tiles_n, GROUP)
        m, n = tile_m * BLOCK_M, tile_n * WIDTH
        n2 = n + N if GATED else n + BLOCK_N
        start = unit // tiles * chunk
        acc, acc2 = _chunk(
            x_ptr, w_ptr, w2_ptr, m, n, n2, start, min(start + chunk, K), T, rows, K,
            BLOCK_M, BLOCK_N, BLOCK_N2, BLOCK_K, TMA, UPCAST,
        )  # fmt: skip
        if SPLITS > 1 and not PARTIAL:
            for s in tl.range(1, SPLITS):
                more, more2 = _chunk(
                    x_ptr, w_ptr, w2_ptr, m, n, n2, s * chunk, min((s + 1) * chunk, K), T, rows, K,
                    BLOCK_M, BLOCK_N, BLOCK_N2, BLOCK_K, TMA, UPCAST,
                )  # fmt: skip
                acc += more
                acc2 += more2
        acc = _biased(acc, bias_ptr, n, rows, BLOCK_N, BIAS)
        if BLOCK_N2 > 1:
            acc2 = _biased(acc2, bias_ptr, n2, rows, BLOCK_N2, BIAS)
        if GATED:
            acc = activate(_rounded(acc, y_ptr), ACTIVATION) * _rounded(acc2, y_ptr)
        y = y_ptr + (unit // tiles).to(tl.int64) * T * N
        _finish(acc, residual_ptr, y, m, n, T, N, scale, BLOCK_M, BLOCK_N, RESIDUAL)
        if BLOCK_N2 > 1 and not GATED:
            _finish(acc2, residual_ptr, y, m, n2, T, N, scale, BLOCK_M, BLOCK_N2, RESIDUAL)


@triton.jit(do_not_specialize=["T"])
def sum_kernel(
    part_ptr, bias_ptr, residual_ptr, y_ptr, T, N, scale,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, N] of the chunks' sums [SPLITS, T, N], added in order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < N
    at = tl.program_id(0).to(tl.int64) * N + col
    if PDL:
        tl.extra.cuda.gdc_wait()
    y = tl.load(part_ptr + at, mask=inside, other=0.0)
    for s in tl.static_range(1, SPLITS):
        y += tl.load(part_ptr + tl.cast(s, tl.int64) * T * N + at, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    y = y * scale
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
