"""Mamba-2's mixer (arXiv 2405.21060)."""

import torch
from torch import Tensor, nn

from cuformers.nn.norm import RMSNorm
from cuformers.nn.project import project
from cuformers.nn.state_space.mixer import Mixer, bounds_of, draw_steps
from cuformers.nn.step import Step


class Mamba2Mixer(Mixer):
    """Convolution, then a recurrence with one decay a head, a gate, and a norm over all heads.

    Groups of heads share B and C; a token's step stays within `dt_limit`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        groups: int,
        state_size: int,
        *,
        kernel: int,
        conv_bias: bool,
        bias: bool,
        eps: float,
        dt_limit: tuple[float, float],
    ) -> None:
        inner, shared = num_heads * head_dim, groups * state_size
        super().__init__(inner + 2 * shared, kernel, conv_bias)
        self.inputs, self.convolved = (inner, inner + 2 * shared, num_heads), (inner, shared, shared)
        self.head_shape, self.group_shape = (num_heads, head_dim), (groups, state_size)
        self.dt_limit = dt_limit
        self.in_proj = nn.Linear(hidden_size, sum(self.inputs), bias=bias)
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.norm = RMSNorm(inner, eps)
        self.D = nn.Parameter(torch.empty(num_heads))
        self.out_proj = nn.Linear(inner, hidden_size, bias=bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        bounds = bounds_of(step)
        gate, mixed, dt = project(self.ops, x, (self.in_proj,)).split(self.inputs, -1)
        u, B, C = self._convolved(mixed, bounds).split(self.convolved, -1)
        u, gate = (v.unflatten(-1, self.head_shape) for v in (u, gate))
        B, C = (v.unflatten(-1, self.group_shape) for v in (B, C))
        riding = {"D": self.D, "z": gate, "dt_bias": self.dt_bias, "dt_limit": self.dt_limit}
        y = self.ops.ssd_scan(u, dt, -torch.exp(self.A_log.float()), B, C, bounds, **riding).y
        return project(self.ops, y.flatten(1), (self.out_proj,), norm=self.norm)

    def initialize(self, generator: torch.Generator) -> None:
        heads = torch.arange(1, self.A_log.numel() + 1, device=self.A_log.device, dtype=torch.float32)
        self.A_log.copy_(heads.log())
        self.D.fill_(1.0)
        draw_steps(self.dt_bias, generator)
