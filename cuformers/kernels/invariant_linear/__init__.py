"""Ops `invariant_linear` and `invariant_gated_linear`: `linear` and `gated_linear` for deterministic=True.

    invariant_linear(x [T, K], weight [N, K], bias [N] | None, *, norm=None, residual=None, scale=1.0,
                     overwrite=False) -> [T, N]
    invariant_gated_linear(x [T, K], weight [2I, K], bias [2I] | None, activation, *, norm=None) -> [T, I]

On one model of GPU the bits of a row of the result depend on that row of x, on its row of the residual and on the
weights alone: not on T, on the row's place, on the other rows, on graph or eager, or on whether gradients are asked
for (both modes run the same kernels). They do depend on the weight's shape [N, K]: parts of a weight that are
multiplied one by one may differ from the whole. Gate and up are rounded to the dtype before the activation. The
reference gives the values; it promises no bits.
"""

from cuformers.kernels.op import two_ways

INVARIANT_LINEAR = two_ways(__name__, "invariant_linear", modes=frozenset({"infer", "train"}))
INVARIANT_GATED_LINEAR = two_ways(__name__, "invariant_gated_linear", modes=frozenset({"infer", "train"}))
