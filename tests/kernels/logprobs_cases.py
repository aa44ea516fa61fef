"""logprobs against its reference, on rows of every kind, shared by the CPU interpreter's tests and the GPU's."""

import torch
from torch import Tensor

from .judge import poisoned


def awkward_logits(num_tokens: int) -> Tensor:
    """[12, V], float32: plain rows first, then ties, infinities, NaN, zeros of both signs, and likely neighbours."""
    logits = torch.randn(12, num_tokens) * 3
    half = num_tokens // 2
    logits[2] = logits[2].round()
    logits[3] = 1.5
    logits[4, half:] = -torch.inf
    logits[5, 3:80] = torch.nan  # whole groups of it
    logits[6] = -torch.inf
    logits[7, half] = torch.inf
    logits[8] = torch.where(logits[8] > 0, 0.0, -0.0)
    logits[9] *= 1000
    logits[10] = torch.arange(num_tokens) / num_tokens
    return logits


def check_logprobs(num_tokens: int, top: int, dtype: torch.dtype, device: torch.device) -> None:
    """Both ways give the same ranks and ids, and log-probabilities that differ by float32's rounding."""
    from cuformers.kernels.logprobs import reference, triton

    torch.manual_seed(num_tokens + top)
    logits = awkward_logits(num_tokens).to(device, dtype)
    tokens = torch.randint(0, num_tokens, (12,))
    tokens[4], tokens[11] = num_tokens - 1, -1
    with poisoned():
        found = triton.logprobs(logits, tokens.to(device), top)
    expected = reference.logprobs(logits, tokens.to(device), top)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
