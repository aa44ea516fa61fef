"""Products of up to 16 rows with a weight that is read once, on tensor cores.

Weights go from memory straight to the registers in which the tensor cores take them: 16 weight rows are the left
operand of m16n8k16, rows of x the right one, and a thread's 8 neighbours in K count as two of its steps, on both
sides alike. So loads are 16 bytes wide, nothing goes through shared memory, and the loads of `AHEAD` chunks come before
`gdc_wait`: they fly while the predecessor finishes. Each warp has its own columns, summed over the warps at the end.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from cuformers.kernels.activation_triton import activate

BLOCK_N = gl.constexpr(16)
"""Outputs per program."""
BLOCK_K = gl.constexpr(64)
"""Columns of a warp in one chunk."""


@gluon.jit
def _weights(w_ptr, row, inside, start, K: gl.constexpr, WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """[WARPS, BLOCK_N, BLOCK_K] of the weight rows, from column `start` on; zero past the end."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    col = gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    k = (start + warp * BLOCK_K)[:, None, None] + col[None, None, :]
    mask = inside[None, :, None] & (k < K)
    return gl.load(w_ptr + row[None, :, None].to(gl.int64) * K + k, mask=mask, other=0.0)


@gluon.jit
def _rows(x_ptr, T, start, K: gl.constexpr, WARPS: gl.constexpr, BLOCK_T: gl.constexpr, LAYOUT: gl.constexpr):
    """[WARPS, BLOCK_K, BLOCK_T] of x, transposed; zero past the ends."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    col = gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    t = gl.arange(0, BLOCK_T, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    k = (start + warp * BLOCK_K)[:, None, None] + col[None, :, None]
    return gl.load(x_ptr + t * K + k, mask=(t < T) & (k < K), other=0.0)


@gluon.jit
def mma_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, T, N, scale,
    K: gl.constexpr, WARPS: gl.constexpr, BLOCK_T: gl.constexpr, AHEAD: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y [T, N] of x [T, K]; with an ACTIVATION other than "none" the weight is [2N, K], gate rows first."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GATED: gl.constexpr = ACTIVATION != "none"
    SPAN: gl.constexpr = WARPS * BLOCK_K
    CHUNKS: gl.constexpr = (K + SPAN - 1) // SPAN
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    row = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))
    inside = row < N
    w, up = (), ()
    for c in gl.static_range(AHEAD):
        w = w + (_weights(w_ptr, row, inside, c * SPAN, K, WARPS, LEFT),)  # noqa: RUF005
        if GATED:
            up = up + (_weights(w_ptr, row + N, inside, c * SPAN, K, WARPS, LEFT),)  # noqa: RUF005
    acc = gl.zeros((WARPS, BLOCK_N, BLOCK_T), gl.float32, MMA)
    up_acc = gl.zeros((WARPS, BLOCK_N, BLOCK_T), gl.float32, MMA)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for c in gl.static_range(CHUNKS):
        x = _rows(x_ptr, T, c * SPAN, K, WARPS, BLOCK_T, RIGHT)
        acc = mma_v2(w[c], x, acc)
        if GATED:
            up_acc = mma_v2(up[c], x, up_acc)
        if c + AHEAD < CHUNKS:
            w = w + (_weights(w_ptr, row, inside, (c + AHEAD) * SPAN, K, WARPS, LEFT),)  # noqa: RUF005
            if GATED:
                up = up + (_weights(w_ptr, row + N, inside, (c + AHEAD) * SPAN, K, WARPS, LEFT),)  # noqa: RUF005
    y = gl.sum(acc, 0)
    n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(0, MMA)))
    t = gl.arange(0, BLOCK_T, gl.SliceLayout(0, gl.SliceLayout(0, MMA)))
    if BIAS:
        y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    if GATED:
        second = gl.sum(up_acc, 0)
        if BIAS:
            second += gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        y = activate(y, ACTIVATION) * second
    y *= scale
    at = t[None, :] * N + n[:, None]
    mask = (n < N)[:, None] & (t < T)[None, :]
    if RESIDUAL:
        y += gl.load(residual_ptr + at, mask=mask, other=0.0).to(gl.float32)
    gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
