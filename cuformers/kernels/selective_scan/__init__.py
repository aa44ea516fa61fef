"""Op `selective_scan`: Mamba's recurrence (arXiv 2312.00752), every channel with a state of its own.

    selective_scan(x [T, C], dt [T, C], A [C, S] float32, B [T, S], C [T, S], cu_seqlens [N + 1] int32, *,
                   D=None [C], z=None [T, C], dt_bias=None [C], initial=None [N, C, S] float32, keep=False) -> Scanned

Over the tokens t of a sequence, with s = softplus(dt[t] + dt_bias) and A below 0:

    h = exp(s * A) * h + s * x[t] * B[t];    y[t] = (sum over the state of h * C[t] + D * x[t]) * silu(z[t])

Sequence n of the flat stream is [cu_seqlens[n], cu_seqlens[n + 1]); the last one ends at T, and any may be empty. Its
first state is `initial[n]`, or zeros. All is computed in float32 and rounded once. Rows of the inputs may lie apart.
"""

from typing import NamedTuple

from torch import Tensor

from cuformers.kernels.op import two_ways


class Scanned(NamedTuple):
    """What a scan returns."""

    y: Tensor
    """In x's shape and dtype."""
    final: Tensor | None
    """The state after each sequence's last token, float32, in the shape of `initial`; None without `keep`."""


OP = two_ways(__name__, "selective_scan")
