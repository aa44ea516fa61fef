"""What the mixers of Mamba and Mamba-2 have in common: the short convolution, and where its sequences begin."""

import math

import torch
from torch import Tensor, nn

from cuformers.nn.kernel_module import KernelModule
from cuformers.nn.step import Step

STEPS = (0.001, 0.1)
"""Range of the step sizes of a new model, before anything is known of a token."""


class Mixer(KernelModule):
    """Tokens [T, H] -> [T, H], each token a function of those up to it in its sequence. Names are the checkpoint's."""

    def __init__(self, channels: int, kernel: int, bias: bool) -> None:
        """`channels` go through a convolution over `kernel` tokens."""
        super().__init__()
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, padding=kernel - 1, bias=bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        raise NotImplementedError

    def initialize(self, generator: torch.Generator) -> None:
        """Fills the parameters that rule how long a state lasts; all others are random like in any model."""
        raise NotImplementedError

    def _convolved(self, x: Tensor, bounds: Tensor) -> Tensor:
        return self.ops.causal_conv1d(x, self.conv1d.weight[:, 0], self.conv1d.bias, bounds).y


def bounds_of(step: Step) -> Tensor:
    """[N + 1], int32: where each sequence begins."""
    assert step.phase == "full" and step.cu_seqlens is not None, "state-space layers need whole sequences"
    return step.cu_seqlens


def draw_steps(bias: Tensor, generator: torch.Generator) -> None:
    """Fills a bias so that the softplus of it is evenly spread over STEPS on a logarithmic scale."""
    low, high = (math.log(s) for s in STEPS)
    steps = torch.empty(bias.shape, device=bias.device).uniform_(low, high, generator=generator).exp()
    bias.copy_(steps + torch.log(-torch.expm1(-steps)))
