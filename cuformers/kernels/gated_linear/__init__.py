"""Ops `gated_linear` and `gated_activation`: act(gate) * up, with and without the product that makes them.

    gated_linear(x [T, K], weight [2I, K], bias [2I] | None, activation, *, norm=None) -> [T, I]
    gated_activation(gate_up [T, 2I], activation) -> [T, I]

Rows 0..I-1 of the weight (columns of gate_up) are the gate, the rest is up. `activation` is "silu", "gelu" (erf),
"gelu_tanh" or "relu". The fused op keeps gate and up in float32 until the end.
"""

from cuformers.kernels.op import two_ways

GATED_LINEAR = two_ways(__name__, "gated_linear")
GATED_ACTIVATION = two_ways(__name__, "gated_activation")
