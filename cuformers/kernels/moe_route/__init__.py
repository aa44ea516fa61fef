"""Op `moe_route`: the experts of each token, and how much each of them counts.

    moe_route(logits [T, E], top_k, *, normalise) -> Routes(weights [T, top_k] float32, ids [T, top_k] int32)

The weights are the softmax over all experts, in float32, of the top_k largest logits, largest first; the smaller index
comes first where logits are equal. `normalise` divides them by their sum. A NaN ranks last and makes its row's weights
NaN; ids are always below E, and differ within a row.
"""

from typing import NamedTuple

from torch import Tensor

from cuformers.kernels.op import two_ways


class Routes(NamedTuple):
    """Where the tokens go."""

    weights: Tensor
    """[T, top_k], float32."""
    ids: Tensor
    """[T, top_k], int32."""


OP = two_ways(__name__, "moe_route")
