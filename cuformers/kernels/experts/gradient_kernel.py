"""What the backward pass needs beside grouped products: through the activation, and a gradient for each expert."""

import triton
import triton.language as tl

from cuformers.kernels.activation_triton import activate, slope


@triton.jit
def gate_gradient_kernel(
    gate_up_ptr, grad_ptr, order_ptr, weights_ptr, out_ptr, weighted_ptr, weight_grad_ptr, I,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Grid [P], by sorted rows. gate_up [P, 2I], and grad [P, I] of the weighted h = act(gate) * up before its weight.

    out [P, 2I]: gradient of gate_up. weighted [P, I]: h times the pair's weight. weight_grad [P]: the weight's own
    gradient, in the pairs' order.
    """
    place = tl.program_id(0).to(tl.int64)
    pair = tl.load(order_ptr + place)
    weight = tl.load(weights_ptr + pair)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, I, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = col < I
        gate = tl.load(gate_up_ptr + place * 2 * I + col, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + place * 2 * I + I + col, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place * I + col, mask=inside, other=0.0).to(tl.float32)
        opened = activate(gate, ACTIVATION)
        total += grad * opened * up
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        tl.store(weighted_ptr + place * I + col, (weight * opened * up).to(dtype), mask=inside)
        grad *= weight
        tl.store(out_ptr + place * 2 * I + col, (grad * up * slope(gate, ACTIVATION)).to(dtype), mask=inside)
        tl.store(out_ptr + place * 2 * I + I + col, (grad * opened).to(dtype), mask=inside)
    tl.store(weight_grad_ptr + pair, tl.sum(total, axis=0))


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
