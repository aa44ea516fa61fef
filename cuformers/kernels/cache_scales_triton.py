"""What kernels do with the numbers and factors of an fp8 cache."""

import triton
import triton.language as tl

from cuformers.kernels import cache_scales

LARGEST = tl.constexpr(cache_scales.LARGEST)
LEAST = tl.constexpr(cache_scales.LEAST)
ONE = tl.constexpr(0x3F800000)
MANTISSA = tl.constexpr(cache_scales.MANTISSA)
EVEN = tl.constexpr("""{
    .reg .b32 t;
    .reg .b16 a, b;
    prmt.b32 t, $1, 0, 0x4420;
    mov.b32 {a, b}, t;
    cvt.rn.f16x2.e4m3x2 $0, a;
}""")
ODD = tl.constexpr("""{
    .reg .b32 t;
    .reg .b16 a, b;
    prmt.b32 t, $1, 0, 0x4431;
    mov.b32 {a, b}, t;
    cvt.rn.f16x2.e4m3x2 $0, a;
}""")
"""Of two pairs of numbers, bytes 0 to 3, the first or the second of each."""


@triton.jit
def head_scale(a, b, c):
    """Factors [HEADS] of heads whose numbers are a, b and c [HEADS, columns] together; float32, powers of two."""
    top = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
    top = tl.maximum(top, tl.max(tl.abs(c), axis=1))
    least = tl.maximum(top, LEAST) * (1 / LARGEST)
    return ((least.to(tl.int32, bitcast=True) + MANTISSA) & ~MANTISSA).to(tl.float32, bitcast=True)


@triton.jit
def inverse(scale):
    """1 / scale, for a power of two."""
    return (-scale.to(tl.int32, bitcast=True) + 2 * ONE).to(tl.float32, bitcast=True)


@triton.jit
def exponent(scale):
    """log2(scale), for a power of two."""
    return ((scale.to(tl.int32, bitcast=True) - ONE) >> 23).to(tl.float32)


@triton.jit
def to_fp8(x, EMULATED: tl.constexpr):
    """float32 within fp8's range, rounded to nearest, ties to even. EMULATED: what is cast is on fp8's grid already,
    as Triton's interpreter rounds wrongly."""
    if EMULATED:
        octave = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        large = tl.maximum(octave, 2.0**-6) * (1.5 * 2**20)  # its last bit is fp8's in x's octave
        x = (x + large) - large
    return x.to(tl.float8e4nv)


@triton.jit
def load_scales(
    k_ptr, v_ptr, page, page_stride, start, low, high, PAGE: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Factors of keys and values [BLOCK_S] of positions start.., 1 outside [low, high). Pointers are the kv head's.

    `page` is the tile's, or that of each position where a tile is longer than a page.
    """
    i = tl.arange(0, BLOCK_S)
    seen = (start + i >= low) & (start + i < high)
    within = start % PAGE + i if PAGE >= BLOCK_S else (start + i) % PAGE
    at = page.to(tl.int64) * page_stride + within
    return tl.load(k_ptr + at, mask=seen, other=1.0), tl.load(v_ptr + at, mask=seen, other=1.0)


@triton.jit
def unpacked(pairs, EMULATED: tl.constexpr):
    """From pairs of fp8 numbers, int16, the first and the second of each, float16. EMULATED: without PTX."""
    if EMULATED:
        first, second = (pairs & 0xFF).to(tl.uint8), ((pairs >> 8) & 0xFF).to(tl.uint8)
        first, second = first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)
        return first.to(tl.float16), second.to(tl.float16)
    else:
        first = tl.inline_asm_elementwise(EVEN, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)
        second = tl.inline_asm_elementwise(ODD, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)
        return first, second


@triton.jit
def normalized(a, b, EMULATED: tl.constexpr):
    """Parts of queries in the dtype of products with fp8 keys, and the factor that was taken out; b may be a.

    bfloat16 has numbers that float16 has not, so the largest becomes 1. float32, and the interpreter's, stay.
    """
    if a.dtype == tl.float16 and not EMULATED:
        return a, b, 1.0
    elif a.dtype == tl.bfloat16 and not EMULATED:
        top = tl.maximum(tl.max(tl.abs(a.to(tl.float32))), tl.max(tl.abs(b.to(tl.float32))))
        size = tl.maximum(top, LEAST)
        return (a.to(tl.float32) / size).to(tl.float16), (b.to(tl.float32) / size).to(tl.float16), size
    else:
        return a.to(tl.float32), b.to(tl.float32), 1.0
