"""Which kernel computes the attention of backend sdpa: a pure function of what is known before a step."""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch

HALF = frozenset({torch.bfloat16, torch.float16})
CUDNN_LENGTH = 4096
"""Tokens of a sequence from which on cuDNN is taken: the shortest that was measured (an H200, head_dim 128, causal)."""

SdpaKernel = Literal["torch", "flash", "cudnn", "efficient", "varlen"]


class SdpaProblem(NamedTuple):
    """What the choice depends on."""

    capability: tuple[int, int] | None
    """Of the GPU; None on the CPU."""
    dtype: torch.dtype
    head_dim: int
    length: int | None
    """Tokens of each sequence where all have the same number; None where they differ or only the device knows."""
    windowed: bool
    """Whether the window hides keys that a causal mask shows."""


class SdpaChoice(NamedTuple):
    """A kernel and the reason for it."""

    kernel: SdpaKernel
    """"torch" leaves the choice to PyTorch; "varlen" is its FlashAttention-2 over a flat stream."""
    why: str


@lru_cache(maxsize=256)
def choose_kernel(problem: SdpaProblem) -> SdpaChoice:
    """The kernel for a problem.

    Example:
        >>> choose_kernel(SdpaProblem((9, 0), torch.bfloat16, 128, 4096, False)).kernel
        'cudnn'
        >>> choose_kernel(SdpaProblem((9, 0), torch.bfloat16, 128, None, False)).kernel
        'varlen'
    """
    on, head_dim = problem.capability, problem.head_dim
    if on is None:
        return SdpaChoice("torch", "on the CPU PyTorch chooses")
    if on < (8, 0) or problem.dtype not in HALF or head_dim > 256:
        flash = f"flash does not take {problem.dtype} with a head_dim of {head_dim} on capability {on[0]}.{on[1]}"
        return SdpaChoice("efficient", f"{flash}, and this needs no n x n scores either")
    if not takes_varlen(on, problem.dtype, head_dim):
        return SdpaChoice("flash", f"it fills heads of {head_dim} up to a multiple of 8")
    if problem.windowed:
        return SdpaChoice("varlen", "it takes a window without a mask in memory")
    if problem.length is None:
        return SdpaChoice("varlen", "lengths differ, and it takes them as they are")
    if on == (9, 0) and head_dim <= 128 and problem.length >= CUDNN_LENGTH:
        return SdpaChoice("cudnn", "the fastest of PyTorch's on Hopper for long sequences of one length")
    if on == (9, 0) and head_dim <= 128:
        return SdpaChoice("flash", f"cuDNN plans anew for every shape, and was measured from {CUDNN_LENGTH} tokens on")
    return SdpaChoice("flash", "cuDNN was measured on Hopper alone, up to a head_dim of 128")


def takes_varlen(on: tuple[int, int] | None, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether PyTorch's varlen_attn takes these."""
    return on is not None and on >= (8, 0) and dtype in HALF and head_dim <= 256 and head_dim % 8 == 0
