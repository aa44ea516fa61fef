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


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up, and the activation of `experts` that is not of this form."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0)
    else:
        return activate(gate, ACTIVATION) * up


@triton.jit
def gated_slopes(gate, up, ACTIVATION: tl.constexpr):
    """The derivatives of `gated` by gate and by up."""
    if ACTIVATION == "clamped_swiglu":
        below, within = gate <= 7.0, (up >= -7.0) & (up <= 7.0)
        gate = tl.minimum(gate, 7.0)
        s = 1.0 / (1.0 + tl.exp(-1.702 * gate))
        by_gate = (s + 1.702 * gate * s * (1.0 - s)) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0)
        return tl.where(below, by_gate, 0.0), tl.where(within, gate * s, 0.0)
    else:
        return slope(gate, ACTIVATION) * up, activate(gate, ACTIVATION)
