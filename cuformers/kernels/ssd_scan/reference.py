"""Mamba-2's recurrence token by token: the specification."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cuformers.kernels.precision import wide
from cuformers.kernels.selective_scan import Scanned
from cuformers.kernels.sequences import to_rows, to_stream


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    cu_seqlens: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial: Tensor | None = None,
    keep: bool = False,
) -> Scanned:
    """See the package."""
    (_, H, P), (_, G, S) = x.shape, B.shape
    step = F.softplus(wide(dt) if dt_bias is None else wide(dt) + wide(dt_bias)).clamp(*dt_limit)
    inputs = to_rows(step[..., None] * wide(x), cu_seqlens)
    decay = to_rows(step * wide(A), cu_seqlens).exp()  # after a sequence's end 1, with inputs of 0: the state stays
    b, c = (to_rows(wide(v), cu_seqlens).repeat_interleave(H // G, 2) for v in (B, C))
    N, longest = inputs.shape[:2]
    h = inputs.new_zeros(N, H, P, S) if initial is None else wide(initial)
    outs = [inputs.new_zeros(N, 0, H, P)]
    for t in range(longest):
        h = decay[:, t, :, None, None] * h + inputs[:, t, :, :, None] * b[:, t, :, None]
        outs.append((h * c[:, t, :, None]).sum(-1)[:, None])
    y = to_stream(torch.cat(outs, 1), cu_seqlens)
    y = y if D is None else y + wide(D)[:, None] * wide(x)
    y = y if z is None else y * F.silu(wide(z))
    return Scanned(y.to(x.dtype), h if keep else None)
