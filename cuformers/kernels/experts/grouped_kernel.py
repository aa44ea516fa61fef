"""Products of sorted rows, each with its own expert's matrix, and what is added up of them."""

import triton
import triton.language as tl

from cuformers.kernels.activation_triton import gated


@triton.jit
def _multiply(acc, a, b, UPCAST: tl.constexpr):
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _columns(at, k, col, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of a matrix, zero outside of it; masks cost nothing where the blocks divide the matrix."""
    if K % BLOCK_K == 0 and N % BLOCK_N == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(k < K)[:, None] & (col < N)[None, :], other=0.0)


@triton.jit
def grouped_kernel(
    x_ptr, w_ptr, bias_ptr, order_ptr, tiles_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TOP_K: tl.constexpr, TRANSPOSED: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [P, N] in sorted order: tile by tile the rows of x times the tile's expert's weight [N, K], or [K, N] where
    TRANSPOSED. The rows are x's own, sorted, or with TOP_K above 0 those of the pairs' tokens.

    With an ACTIVATION other than "none" the weight has 2N outputs, of which y is made: the gate's first, or gate and up
    in turn where INTERLEAVED.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    GATED: tl.constexpr = ACTIVATION != "none"
    SECOND: tl.constexpr = GATED and not INTERLEAVED  # a product of its own for up
    TIMES: tl.constexpr = 2 if GATED and INTERLEAVED else 1  # columns of the product that make one of y
    WIDTH: tl.constexpr = TIMES * BLOCK_N
    COLUMNS: tl.constexpr = TIMES * N
    tl.static_assert(not (SECOND and TRANSPOSED), "up follows gate by whole rows")
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // tiles_n
    expert = tl.load(tiles_ptr + tile * 3)
    if expert < 0:
        return
    row = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_M)
    inside = row < tl.load(tiles_ptr + tile * 3 + 2)
    source = row
    if TOP_K > 0:
        source = tl.load(order_ptr + row, mask=inside, other=0) // TOP_K
    first = tl.program_id(0) % tiles_n * BLOCK_N
    col = first * TIMES + tl.arange(0, WIDTH)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + source.to(tl.int64)[:, None] * K + k[None, :]
    w = w_ptr + expert.to(tl.int64) * (2 * N * K if GATED else N * K)
    w += k[:, None] * COLUMNS + col[None, :] if TRANSPOSED else col[None, :] * K + k[:, None]
    step: tl.constexpr = BLOCK_K * COLUMNS if TRANSPOSED else BLOCK_K
    acc = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    if SECOND:
        acc2 = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            a = tl.load(x, mask=inside[:, None], other=0.0)
        else:
            a = tl.load(x, mask=inside[:, None] & (start + k < K)[None, :], other=0.0)
        acc = _multiply(acc, a, _columns(w, start + k, col, COLUMNS, K, BLOCK_K, WIDTH), UPCAST)
        if SECOND:
            acc2 = _multiply(acc2, a, _columns(w + N * K, start + k, col, N, K, BLOCK_K, BLOCK_N), UPCAST)
        x += BLOCK_K
        w += step
    if BIAS:
        bias = bias_ptr + expert.to(tl.int64) * (2 * N if GATED else N) + col
        acc += tl.load(bias, mask=col < COLUMNS, other=0.0).to(tl.float32)[None, :]
        if SECOND:
            acc2 += tl.load(bias + N, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if SECOND:
        acc = gated(acc, acc2, ACTIVATION)
    elif GATED:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
        acc = gated(gate, up, ACTIVATION)
    col = first + tl.arange(0, BLOCK_N)
    at = y_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (col < N)[None, :])


@triton.jit
def combine_kernel(
    y_ptr, places_ptr, weights_ptr, residual_ptr, out_ptr, scale, H,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [T, blocks of H]: a token's TOP_K sorted rows, weighted, added in the order of its choices."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < H
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + j).to(tl.int64)
        part = tl.load(y_ptr + place * H + col, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights_ptr + token * TOP_K + j)
        total += part
    total *= scale
    if RESIDUAL:
        total += tl.load(residual_ptr + token * H + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + col, total.to(out_ptr.dtype.element_ty), mask=inside)
