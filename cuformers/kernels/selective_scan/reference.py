"""Mamba's recurrence token by token: the specification."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cuformers.kernels.precision import wide
from cuformers.kernels.selective_scan import Scanned
from cuformers.kernels.sequences import to_rows, to_stream


def selective_scan(
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
    initial: Tensor | None = None,
    keep: bool = False,
) -> Scanned:
    """See the package."""
    step = F.softplus(wide(dt) if dt_bias is None else wide(dt) + wide(dt_bias))
    inputs = to_rows(step * wide(x), cu_seqlens)
    steps, b, c = (to_rows(wide(v), cu_seqlens) for v in (step, B, C))  # a step of 0, after the end, changes no state
    N, longest, channels = inputs.shape
    h = inputs.new_zeros(N, channels, A.shape[1]) if initial is None else wide(initial)
    outs = [inputs.new_zeros(N, 0, channels)]
    for t in range(longest):
        h = torch.exp(steps[:, t, :, None] * wide(A)) * h + inputs[:, t, :, None] * b[:, t, None]
        outs.append((h * c[:, t, None]).sum(-1)[:, None])
    y = to_stream(torch.cat(outs, 1), cu_seqlens)
    y = y if D is None else y + wide(D) * wide(x)
    y = y if z is None else y * F.silu(wide(z))
    return Scanned(y.to(x.dtype), h if keep else None)
