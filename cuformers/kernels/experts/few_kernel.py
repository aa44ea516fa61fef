"""The experts of one to four tokens: no sort, as hardly any two tokens share an expert; each weight row read once."""

import triton
import triton.language as tl

from cuformers.kernels.activation_triton import activate
from cuformers.kernels.linear.fma_kernel import _dot_row, _row_chunks, _weight_chunks


@triton.jit
def up_kernel(
    x_ptr, w_ptr, ids_ptr, h_ptr, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, COPIES: tl.constexpr,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of N, pairs]: h [pairs, N] = act(gate) * up of the pair's token by its expert's weight [2N, K]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < N
    w_ptr += tl.load(ids_ptr + pair).to(tl.int64) * 2 * N * K
    gate = _weight_chunks(w_ptr, row, inside, K, BLOCK_K)
    up = _weight_chunks(w_ptr, row + N, inside, K, BLOCK_K)
    x = _row_chunks(x_ptr + pair // TOP_K * K, K, BLOCK_K, COPIES)
    h = activate(_dot_row(gate, x, CHUNKS), ACTIVATION) * _dot_row(up, x, CHUNKS)
    tl.store(h_ptr + pair * N + row, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def down_kernel(
    h_ptr, w_ptr, ids_ptr, weights_ptr, residual_ptr, y_ptr, N, scale,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, COPIES: tl.constexpr,
    TOP_K: tl.constexpr, AT_ONCE: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of N, tokens]: y [tokens, N], the weighted sum over a token's experts of their weight [N, K] by h.

    The weights of AT_ONCE experts are asked for before any of them is used.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < N
    y = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in tl.static_range(0, TOP_K, AT_ONCE):
        ws, hs = (), ()
        for j in tl.static_range(start, min(start + AT_ONCE, TOP_K)):
            pair = token * TOP_K + j
            expert = tl.load(ids_ptr + pair).to(tl.int64)
            ws = ws + (_weight_chunks(w_ptr + expert * N * K, row, inside, K, BLOCK_K),)  # noqa: RUF005
            hs = hs + (_row_chunks(h_ptr + pair * K, K, BLOCK_K, COPIES),)  # noqa: RUF005
        for j in tl.static_range(start, min(start + AT_ONCE, TOP_K)):
            y += tl.load(weights_ptr + token * TOP_K + j) * _dot_row(ws[j - start], hs[j - start], CHUNKS)
    y *= scale
    if RESIDUAL:
        y += tl.load(residual_ptr + token * N + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + row, y.to(y_ptr.dtype.element_ty), mask=inside)
