"""What training needs beside grouped products: the activation and the way back through it, and sums by expert."""

import triton
import triton.language as tl

from cuformers.kernels.activation_triton import gated, gated_slopes


@triton.jit
def _halves(ptr, place, col, I, INTERLEAVED: tl.constexpr):
    """Pointers to gate and up of a sorted row [2I]."""
    ptr += place * 2 * I
    if INTERLEAVED:
        return ptr + 2 * col, ptr + 2 * col + 1
    else:
        return ptr + col, ptr + I + col


@triton.jit
def gate_kernel(
    opened_ptr, h_ptr, I, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Grid [P, blocks of I]: h [P, I] = act(gate) * up of opened [P, 2I]."""
    place = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_at, up_at = _halves(opened_ptr, place, col, I, INTERLEAVED)
    gate = tl.load(gate_at, mask=col < I, other=0.0).to(tl.float32)
    up = tl.load(up_at, mask=col < I, other=0.0).to(tl.float32)
    tl.store(h_ptr + place * I + col, gated(gate, up, ACTIVATION).to(h_ptr.dtype.element_ty), mask=col < I)


@triton.jit
def gate_gradient_kernel(
    opened_ptr, grad_ptr, order_ptr, weights_ptr, out_ptr, weighted_ptr, weight_grad_ptr, I,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Grid [P], by sorted rows. opened [P, 2I], and grad [P, I] of the weighted h = act(gate) * up before its weight.

    out [P, 2I]: gradient of opened. weighted [P, I]: h times the pair's weight. weight_grad [P]: the weight's own
    gradient, in the pairs' order.
    """
    place = tl.program_id(0).to(tl.int64)
    pair = tl.load(order_ptr + place)
    weight = tl.load(weights_ptr + pair)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, I, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = col < I
        gate_at, up_at = _halves(opened_ptr, place, col, I, INTERLEAVED)
        gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place * I + col, mask=inside, other=0.0).to(tl.float32)
        h = gated(gate, up, ACTIVATION)
        total += grad * h
        tl.store(weighted_ptr + place * I + col, (weight * h).to(dtype), mask=inside)
        by_gate, by_up = gated_slopes(gate, up, ACTIVATION)
        gate_at, up_at = _halves(out_ptr, place, col, I, INTERLEAVED)
        tl.store(gate_at, (weight * grad * by_gate).to(dtype), mask=inside)
        tl.store(up_at, (weight * grad * by_up).to(dtype), mask=inside)
    tl.store(weight_grad_ptr + pair, tl.sum(total, axis=0))


@triton.jit
def row_sum_kernel(
    a_ptr, weights_ptr, order_ptr, bounds_ptr, out_ptr, N,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid [E, blocks of N]: out [E, N], the sum of an expert's rows of a, weighted where asked for, in their order."""
    expert = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, stop = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in tl.range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < stop
        pair = tl.load(order_ptr + row, mask=inside, other=0)
        source = pair // TOP_K if TOP_K > 0 else row
        at = a_ptr + source.to(tl.int64)[:, None] * N + col[None, :]
        part = tl.load(at, mask=inside[:, None] & (col < N)[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights_ptr + pair, mask=inside, other=0.0)[:, None]
        total += part
    out = out_ptr + expert.to(tl.int64) * N + col
    tl.store(out, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=col < N)


@triton.jit
def _rows(ptr, row, stop, col, order_ptr, COLUMNS: tl.constexpr, TOP_K: tl.constexpr):
    """[rows, columns] of a matrix of COLUMNS columns: sorted rows, or with TOP_K above 0 those of the pairs' tokens."""
    inside = row < stop
    source = row
    if TOP_K > 0:
        source = tl.load(order_ptr + row, mask=inside, other=0) // TOP_K
    at = ptr + source.to(tl.int64)[:, None] * COLUMNS + col[None, :]
    return tl.load(at, mask=inside[:, None] & (col < COLUMNS)[None, :], other=0.0)


@triton.jit
def weight_gradient_kernel(
    a_ptr, b_ptr, order_ptr, bounds_ptr, out_ptr,
    M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TOP_K_A: tl.constexpr, TOP_K_B: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out [E, M, N]: for each expert the sum over its rows of a [M] times b [N]; zeros where it has none."""
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles: tl.constexpr = tiles_n * ((M + BLOCK_M - 1) // BLOCK_M)
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    m = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    start, stop = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # A gathered row is known one step after its index: Triton then keeps half as many tiles as it is told.
    GATHERS: tl.constexpr = TOP_K_A > 0 or TOP_K_B > 0
    for first in tl.range(start, stop, BLOCK_K, num_stages=2 * STAGES - 1 if GATHERS else STAGES):
        row = first + tl.arange(0, BLOCK_K)
        a = _rows(a_ptr, row, stop, m, order_ptr, M, TOP_K_A)
        b = _rows(b_ptr, row, stop, n, order_ptr, N, TOP_K_B)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")
    at = out_ptr + expert.to(tl.int64) * M * N + m[:, None] * N + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
