"""Products of a few rows with a weight that is read once, by multiply and sum.

A program owns BLOCK_N outputs and streams their weight rows. The loads of the weight come before `gdc_wait`: they
fly while the predecessor finishes, which is where the time of a small product goes.
"""

import triton
import triton.language as tl

from cuformers.kernels.activation_triton import activate


@triton.jit
def _weight_chunks(w_ptr, row, inside, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """All of BLOCK_N weight rows as a tuple of [BLOCK_N, BLOCK_K] chunks."""
    col = tl.arange(0, BLOCK_K)
    at = w_ptr + row.to(tl.int64)[:, None] * K
    chunks = ()
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + col
        if K % BLOCK_K == 0:
            chunk = tl.load(at + k[None, :], mask=inside[:, None], other=0.0, eviction_policy="evict_first")
        else:
            mask = inside[:, None] & (k < K)[None, :]
            chunk = tl.load(at + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        chunks = chunks + (chunk,)  # noqa: RUF005
    return chunks


@triton.jit
def _row_chunks(ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, COPIES: tl.constexpr):
    """One row of K elements as a tuple of [COPIES, BLOCK_K] chunks, zero past the end.

    With a copy for each weight row the chunk has the weight's own layout: every warp loads what it needs, and
    nothing goes through shared memory, which would cost barriers in a kernel of a microsecond.
    """
    col = tl.arange(0, BLOCK_K)[None, :] + tl.zeros((COPIES, 1), dtype=tl.int32)
    chunks = ()
    for start in tl.static_range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            chunk = tl.load(ptr + (start + col))
        else:
            chunk = tl.load(ptr + (start + col), mask=start + col < K, other=0.0)
        chunks = chunks + (chunk,)  # noqa: RUF005
    return chunks


@triton.jit
def _normed(x, g, eps, offset, K: tl.constexpr, CHUNKS: tl.constexpr):
    """The chunks of one row, normalised and rounded to its dtype."""
    square = x[0].to(tl.float32) * x[0].to(tl.float32)
    for c in tl.static_range(1, CHUNKS):
        square += x[c].to(tl.float32) * x[c].to(tl.float32)
    rstd = tl.rsqrt(tl.sum(square, axis=1) / K + eps)[:, None]
    h = ()
    for c in tl.static_range(CHUNKS):
        h = h + ((x[c].to(tl.float32) * rstd * (offset + g[c].to(tl.float32))).to(x[c].dtype),)  # noqa: RUF005
    return h


@triton.jit
def _dot_row(w, h, CHUNKS: tl.constexpr):
    """[BLOCK_N] float32: one reduction, after all chunks have been added up lane by lane."""
    acc = w[0].to(tl.float32) * h[0].to(tl.float32)
    for c in tl.static_range(1, CHUNKS):
        acc += w[c].to(tl.float32) * h[c].to(tl.float32)
    return tl.sum(acc, axis=1)


@triton.jit
def fma_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, N, eps, offset, scale,
    T: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr,
    COPIES: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [T, N] of x [T, K]; with an ACTIVATION other than "none" the weight is [2N, K], gate rows first."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION != "none"
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < N
    w = _weight_chunks(w_ptr, row, inside, K, BLOCK_K)
    if GATED:
        up = _weight_chunks(w_ptr, row + N, inside, K, BLOCK_K)
    if NORM:
        g = _row_chunks(norm_ptr, K, BLOCK_K, COPIES)
    if BIAS:
        bias = tl.load(bias_ptr + row, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + N + row, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    xs, residuals, ys = (), (), ()
    for t in tl.static_range(T):
        xs = xs + (_row_chunks(x_ptr + t * K, K, BLOCK_K, COPIES),)  # noqa: RUF005
        if RESIDUAL:
            residual = tl.load(residual_ptr + t * N + row, mask=inside, other=0.0).to(tl.float32)
            residuals = residuals + (residual,)  # noqa: RUF005
    for t in tl.static_range(T):
        h = _normed(xs[t], g, eps, offset, K, CHUNKS) if NORM else xs[t]
        y = _dot_row(w, h, CHUNKS)
        if BIAS:
            y += bias
        if GATED:
            second = _dot_row(up, h, CHUNKS)
            if BIAS:
                second += up_bias
            y = activate(y, ACTIVATION) * second
        y *= scale
        if RESIDUAL:
            y += residuals[t]
        ys = ys + (y,)  # noqa: RUF005
    for t in tl.static_range(T):
        tl.store(y_ptr + t * N + row, ys[t].to(y_ptr.dtype.element_ty), mask=inside)
