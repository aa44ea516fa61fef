"""The gated layers' activations inside a kernel."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """For float32 x, any magnitude: exp's overflow to infinity gives 1, its underflow -1."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """`ACTIVATION` is a name of `activation.ACTIVATIONS`; x is float32."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(ACTIVATION == "relu")
        return tl.maximum(x, 0.0)


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """The activation's derivative."""
    if ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-x))
        return s + x * s * (1.0 - s)
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    elif ACTIVATION == "gelu_tanh":
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    else:
        tl.static_assert(ACTIVATION == "relu")
        return tl.where(x > 0.0, 1.0, 0.0)
