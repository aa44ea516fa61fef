"""Op `causal_conv1d`: a short convolution over time, each channel by itself (arXiv 2312.00752, section 3.4).

    causal_conv1d(x [T, C], weight [C, K], bias [C] or None, cu_seqlens [N + 1] int32, *,
                  initial=None, activation="silu", keep=False) -> Convolved

x is a flat stream of N sequences, of which sequence n is [cu_seqlens[n], cu_seqlens[n + 1]); the last one ends at T,
and any may be empty. Its rows may lie apart. A token sees itself and the K - 1 tokens before it in its sequence; before
a sequence's first token stands `initial` [N, K - 1, C], in the order of time, or zeros. `activation` is "silu" or
"none". With `keep` the last K - 1 inputs of each sequence come back, as `initial` for what follows it.
"""

from typing import NamedTuple

from torch import Tensor

from cuformers.kernels.op import two_ways


class Convolved(NamedTuple):
    """What the op returns."""

    y: Tensor
    """[T, C], in x's dtype."""
    final: Tensor | None
    """[N, K - 1, C], in x's dtype; None without `keep`."""


OP = two_ways(__name__, "causal_conv1d")
