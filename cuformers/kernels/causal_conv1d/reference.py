"""The convolution over one row a sequence: the specification."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cuformers.kernels.causal_conv1d import Convolved
from cuformers.kernels.precision import wide
from cuformers.kernels.sequences import to_rows, to_stream


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    initial: Tensor | None = None,
    activation: str = "silu",
    keep: bool = False,
) -> Convolved:
    """See the package."""
    rows, K = to_rows(wide(x), cu_seqlens), weight.shape[1]
    first = rows.new_zeros(rows.shape[0], K - 1, rows.shape[2]) if initial is None else wide(initial)
    given, longest = torch.cat((first, rows), 1), rows.shape[1]
    taps = torch.stack([given[:, k : k + longest] * wide(weight[:, k]) for k in range(K)])
    out = to_stream(taps.sum(0), cu_seqlens)
    out = out if bias is None else out + wide(bias)
    y = F.silu(out) if activation == "silu" else out
    return Convolved(y.to(x.dtype), last_inputs(x, cu_seqlens, initial, K - 1) if keep else None)


def last_inputs(x: Tensor, cu_seqlens: Tensor, initial: Tensor | None, count: int) -> Tensor:
    """The last `count` inputs of each sequence [N, count, C]; of a shorter one also the end of what was before it.

    Nothing is read on the host.
    """
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    places = ends + torch.arange(-count, 0, device=x.device)
    own = x[places.clamp(min=0)] if x.shape[0] else x.new_zeros(*places.shape, x.shape[1])
    older = torch.zeros_like(own)
    if initial is not None:
        ages = (places - starts + count).clamp(0, count - 1)
        older = initial.gather(1, ages[..., None].expand_as(own))
    return torch.where((places >= starts)[..., None], own, older)
