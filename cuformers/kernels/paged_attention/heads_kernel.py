"""Query and key heads as attention needs them, from a projected row: normalised and rotated in float32.

A head is loaded twice, the second time with the halves of its rotated pairs exchanged, so that rotation is
x * cos + partner * sin without a shuffle between threads.
"""

import triton
import triton.language as tl


@triton.jit
def _partner(d, HALF: tl.constexpr):
    """Where the other element of each pair is; itself past the rotated part."""
    return tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))


@triton.jit
def rotation(cos_ptr, sin_ptr, row, d, HALF: tl.constexpr):
    """(cos, sin) of each element [BLOCK_D] float32, the sign of the partner in sin; (1, 0) past the rotated part."""
    one = tl.full(d.shape, 1.0, dtype=tl.float32)
    if HALF == 0:
        return one, one - 1.0
    else:
        inside = d < 2 * HALF
        at = row.to(tl.int64) * HALF + tl.where(d < HALF, d, d - HALF)
        cos = tl.load(cos_ptr + at, mask=inside, other=1.0)
        sin = tl.load(sin_ptr + at, mask=inside, other=0.0)
        return cos, tl.where(d < HALF, -sin, sin)


@triton.jit
def head_weight(norm_ptr, offset, d, D: tl.constexpr, HALF: tl.constexpr):
    """offset + weight of a head's norm [BLOCK_D] float32: for the elements, and for their partners."""
    own = offset + tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    other = offset + tl.load(norm_ptr + _partner(d, HALF), mask=d < D, other=0.0).to(tl.float32)
    return own, other


@triton.jit
def load_heads(at, mask, d, cos, sin, weight, eps, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """Heads [M, BLOCK_D] float32 whose first elements are at `at` [M, 1]; zero where masked."""
    x = tl.load(at + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = x * rstd * weight[0][None, :]
    if HALF > 0:
        y = tl.load(at + _partner(d, HALF)[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            y = y * rstd * weight[1][None, :]
        x = x * cos[None, :] + y * sin[None, :]
    return x


@triton.jit
def load_row(
    row_ptr, head, g, d, cos, sin, q_weight, k_weight, eps_q, eps_k,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """From one projected row: the queries [M, BLOCK_D] of a kv head, its key and its value [1, BLOCK_D], rounded."""
    dtype = row_ptr.dtype.element_ty
    there = (g < G)[:, None] & (d < D)[None, :]
    alone = (d < D)[None, :]
    zero = tl.zeros((1, 1), dtype=tl.int64)
    q_at = row_ptr + (head * G + g)[:, None] * D
    k_at = row_ptr + (HKV * G + head) * D + zero
    v_at = row_ptr + (HKV * G + HKV + head) * D + d[None, :]
    q = load_heads(q_at, there, d, cos, sin, q_weight, eps_q, D, HALF, NORM)
    k = load_heads(k_at, alone, d, cos, sin, k_weight, eps_k, D, HALF, NORM)
    return q.to(dtype), k.to(dtype), tl.load(v_at, mask=alone, other=0.0)
