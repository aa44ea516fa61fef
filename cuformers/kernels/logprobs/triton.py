"""logprobs in two launches; the logits are read once, and a few of their groups again."""

import torch
import triton
from torch import Tensor

from cuformers.kernels.launch import pdl
from cuformers.kernels.logprobs import Logprobs, check_top
from cuformers.kernels.logprobs.kernel import row_kernel, split_kernel
from cuformers.kernels.sample.triton import SHIFTS

SPLIT = 4096
"""Tokens that one program of the first stage handles."""
GROUP = 32
"""Neighbouring tokens that share one best logit; also groups of a family."""
WARPS = (4, 8)
"""Of each stage's programs."""


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """See the package."""
    logits = logits.detach().contiguous()
    R, V = logits.shape
    check_top(top, V)
    splits, groups = triton.cdiv(V, SPLIT), triton.cdiv(V, GROUP)
    top_block = max(2, triton.next_power_of_2(top))
    families = max(triton.next_power_of_2(triton.cdiv(groups, GROUP)), top_block)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    found = (empty(R, splits), empty(R, splits), empty(R, splits, dtype=torch.int32), empty(R, groups if top else 0))
    out = Logprobs(empty(R), empty(R, dtype=torch.int32), empty(R, top), empty(R, top, dtype=torch.int64))
    shape = {"GROUPS": groups, "GROUP": GROUP, "TOP": top, **pdl(logits.device)}
    split_kernel[(R, splits)](logits, tokens, *found, V, BLOCK=SPLIT, num_warps=WARPS[0], **shape)
    row_kernel[(R,)](
        logits, tokens, *found, *out, V,
        SPLITS=splits, SPLITS_BLOCK=triton.next_power_of_2(splits), TOP_BLOCK=top_block,
        FAMILY_BITS=families.bit_length() - 1, BITS=(top_block * GROUP).bit_length() - 1,
        SHIFT=SHIFTS.get(logits.dtype, 0), num_warps=WARPS[1], **shape,
    )  # fmt: skip
    return out
