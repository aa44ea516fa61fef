"""Ops `gated_linear` and `gated_activation`: act(gate) * up, with and without the product that makes them.

    gated_linear(x [T, K], weight [2I, K], bias [2I] | None, activation, *, norm=None) -> [T, I]
    gated_activation(gate_up [T, 2I], activation) -> [T, I]

Rows 0..I-1 of the weight (columns of gate_up) are the gate, the rest is up. `activation` is "silu", "gelu" (erf),
"gelu_tanh" or "relu". The fused op keeps gate and up in float32 until the end.
"""

from collections.abc import Callable

from cuformers.kernels.op import Implementation, Op


def _op(name: str) -> Op:
    def load_triton() -> Callable:
        from cuformers.kernels.gated_linear import triton

        return getattr(triton, name)

    def load_reference() -> Callable:
        from cuformers.kernels.gated_linear import reference

        return getattr(reference, name)

    triton = Implementation(name="triton", load=load_triton, modes=frozenset({"infer"}), min_capability=(8, 0))
    return Op(name, (triton, Implementation(name="reference", load=load_reference)))


GATED_LINEAR = _op("gated_linear")
GATED_ACTIVATION = _op("gated_activation")
