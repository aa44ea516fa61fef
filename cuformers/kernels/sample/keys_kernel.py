"""Logits inside the sampling kernels: loaded, scaled, and as integers in the same order.

Keys are made of the logits as they are stored: a 16-bit logit has a key of few bits, which halves every search.
"""

import triton
import triton.language as tl

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Float32 -> int32 in the same order. SHIFT: low bits of the mantissa that the stored dtype does not have."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def float_of(key, SHIFT: tl.constexpr):
    """The float32 of a key."""
    low: tl.constexpr = (1 << SHIFT) - 1
    key = (key << SHIFT) | tl.where(key < 0, low, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bottom(SHIFT: tl.constexpr):
    """Key of minus infinity: no logit is below."""
    return key_of(tl.full((), NEGATIVE_INFINITY, tl.float32), SHIFT)


@triton.jit
def inverse(temperature):
    """What scales a row's logits: 1 / temperature, correctly rounded as in torch; 1 for a greedy row."""
    return tl.where(temperature > 0.0, tl.div_rn(1.0, tl.maximum(temperature, 1e-6)), 1.0)


@triton.jit
def raw(ptr, index, V):
    """Logits in float32; -inf for NaN and past the end."""
    x = tl.load(ptr + index, mask=index < V, other=NEGATIVE_INFINITY).to(tl.float32)
    return tl.where(x == x, x, NEGATIVE_INFINITY)


@triton.jit
def middle(low, high):
    """Floor of the mean without overflow."""
    return (low & high) + ((low ^ high) >> 1)
