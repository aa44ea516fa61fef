"""Ops `layer_norm` and `add_layer_norm` (arXiv 1607.06450).

    layer_norm(x [..., H], weight [H], bias [H] | None, eps, residual=None [..., H]) -> [..., H]
    add_layer_norm(x [..., H], residual [..., H], weight [H], bias [H] | None, eps) -> (normed, sum), both [..., H]

The norm of x, or of x + residual. x and residual share dtype and shape; weight and bias share a float dtype, which may
be another one.
"""

from cuformers.kernels.op import two_ways

LAYER_NORM = two_ways(__name__, "layer_norm")
ADD_LAYER_NORM = two_ways(__name__, "add_layer_norm")
