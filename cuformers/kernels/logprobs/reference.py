"""logprobs in plain PyTorch: the specification."""

import torch
from torch import Tensor

from cuformers.kernels.logprobs import Logprobs, check_top


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """See the package."""
    check_top(top, logits.shape[1])
    skipped, token = (tokens < 0)[:, None], tokens.clamp(min=0)[:, None]
    every = logits.float().log_softmax(-1)
    order = torch.where(logits.isnan(), -torch.inf, logits.float() + 0.0)  # the sum has one zero only
    ids = order.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    above = (order > order.gather(1, token)).sum(1, keepdim=True, dtype=torch.int32)
    return Logprobs(
        chosen=every.gather(1, token).masked_fill(skipped, 0)[:, 0],
        rank=above.masked_fill(skipped, 0)[:, 0],
        values=every.gather(1, ids).masked_fill(skipped, 0),
        ids=ids.masked_fill(skipped, 0),
    )
