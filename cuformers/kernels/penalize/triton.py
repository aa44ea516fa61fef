"""penalize in two launches: one over the vocabulary, one over the history."""

import torch
import triton
from torch import Tensor

from cuformers.kernels.launch import pdl
from cuformers.kernels.penalize import Penalties
from cuformers.kernels.penalize.kernel import penalty_kernel, score_kernel

SPLIT = 4096
"""Tokens of the vocabulary that one program copies."""
SPAN = 256
"""Tokens of the history that a program takes at a time: at least one for each thread, as each is exchanged once."""
SHARES = 8
"""Programs of the second stage for each row."""


def penalize(
    logits: Tensor, rows: Tensor, lengths: Tensor, history: Tensor, penalties: Penalties, counts: Tensor
) -> Tensor:
    """See the package."""
    logits = logits.detach().contiguous()
    R, V = logits.shape
    assert counts.shape == (history.shape[0], V) and counts.is_contiguous(), "the workspace is for other logits"
    assert history.stride(1) == 1, "history has its tokens side by side"
    scores = torch.empty(R, V, dtype=torch.float32, device=logits.device)
    own = [x.contiguous() for x in penalties]
    num_eos, num_bias = penalties.eos.shape[1], penalties.bias.shape[1]
    launch = {"SPAN": SPAN, "num_warps": 4, **pdl(logits.device)}
    score_kernel[(R, triton.cdiv(V, SPLIT))](
        logits, rows, lengths, history, *own, counts, scores, V, history.stride(0), num_eos, num_bias,
        BLOCK=SPLIT, EOS_BLOCK=triton.next_power_of_2(max(num_eos, 1)),
        BIAS_BLOCK=triton.next_power_of_2(max(num_bias, 1)), **launch,
    )  # fmt: skip
    penalty_kernel[(R, SHARES)](
        rows, lengths, history, *own[:4], counts, scores, V, history.stride(0), enable_fp_fusion=False, **launch
    )
    return scores
