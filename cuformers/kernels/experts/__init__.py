"""Op `experts`: each token through its own gated feed-forward blocks, and their weighted sum.

    experts(x [T, H], gate_up [E, 2I, H], down [E, H, I], weights [T, k] float32, ids [T, k] int32, activation, *,
            residual [T, H] | None, scale=1.0, biases: Biases | None, interleaved=False, gate=None) -> [T, H]

    y[t] = residual[t] + scale * sum over j of weights[t, j] * down[e] @ (act(gate) * up)
           with [gate, up] = gate_up[e] @ x[t] and e = ids[t, j]

Rows 0..I-1 of an expert's gate_up are the gate, the rest is up. `activation` is one of `gated_linear`'s; `gate`, where
given, stands for it: it computes act(gate) * up of rows [P, 2I] -> [P, I]. A token's ids differ and are below E.

As in gpt-oss, products may have biases; `interleaved` weights are gate_up [E, H, 2I], gate and up column by column in
turn, and down [E, I, H]; and the activation "clamped_swiglu" is gate * sigmoid(1.702 gate) * (up + 1), gate up to 7 and
up between -7 and 7.

x, gate_up, down and residual share one dtype; products accumulate in float32, the activation is rounded to the dtype
before the second product, and a token's k results are added in the order of its ids, in float32: no order depends on
when anything runs. Shapes alone decide what is launched, so that a captured graph serves any routing. Gradients flow to
all floating-point tensors; an expert without tokens gets zeros.
"""

from typing import NamedTuple

from torch import Tensor

from cuformers.kernels.op import two_ways


class Biases(NamedTuple):
    """What each expert's products add."""

    gate_up: Tensor
    """[E, 2I], in the order of gate_up's outputs."""
    down: Tensor
    """[E, H]."""


OP = two_ways(__name__, "experts", modes=frozenset({"infer", "train"}))
