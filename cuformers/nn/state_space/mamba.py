"""Mamba's mixer (arXiv 2312.00752)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuformers.kernels.precision import wide
from cuformers.nn.project import is_plain, project
from cuformers.nn.state_space.mixer import Mixer, bounds_of, draw_steps
from cuformers.nn.step import Step


class MambaMixer(Mixer):
    """Convolution, then a recurrence whose step, input and output maps depend on the token, then a gate.

    `steps_eps` normalises the token's step, B and C before they are used (Falcon-Mamba, arXiv 2410.05355).
    """

    def __init__(
        self,
        hidden_size: int,
        channels: int,
        state_size: int,
        rank: int,
        *,
        kernel: int,
        conv_bias: bool,
        bias: bool,
        steps_eps: float | None = None,
    ) -> None:
        super().__init__(channels, kernel, conv_bias)
        self.sizes = (rank, state_size, state_size)
        self.steps_eps = steps_eps
        self.in_proj = nn.Linear(hidden_size, 2 * channels, bias=bias)
        self.x_proj = nn.Linear(channels, sum(self.sizes), bias=False)
        self.dt_proj = nn.Linear(rank, channels)
        self.A_log = nn.Parameter(torch.empty(channels, state_size))
        self.D = nn.Parameter(torch.empty(channels))
        self.out_proj = nn.Linear(channels, hidden_size, bias=bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        bounds = bounds_of(step)
        u, gate = project(self.ops, x, (self.in_proj,)).chunk(2, -1)
        u = self._convolved(u, bounds)
        low, B, C = project(self.ops, u, (self.x_proj,)).split(self.sizes, -1)
        if self.steps_eps is not None:
            low, B, C = (_normed(v, self.steps_eps) for v in (low, B, C))
        dt, bias = self._steps(low.contiguous())
        A = -torch.exp(self.A_log.float())
        y = self.ops.selective_scan(u, dt, A, B, C, bounds, D=self.D, z=gate, dt_bias=bias).y
        return project(self.ops, y, (self.out_proj,))

    def _steps(self, low: Tensor) -> tuple[Tensor, Tensor | None]:
        """Steps [T, channels] before the softplus, and the bias that they lack.

        The scan adds it in float32: steps are small, and an exponent's rounding to bfloat16 would change their ratio.
        """
        if is_plain(self.dt_proj):
            return self.ops.linear(low, self.dt_proj.weight), self.dt_proj.bias
        return self.dt_proj(low), None

    def initialize(self, generator: torch.Generator) -> None:
        states = torch.arange(1, self.A_log.shape[1] + 1, device=self.A_log.device, dtype=torch.float32)
        self.A_log.copy_(states.log().expand_as(self.A_log))
        self.D.fill_(1.0)
        spread = self.sizes[0] ** -0.5
        self.dt_proj.weight.uniform_(-spread, spread, generator=generator)
        draw_steps(self.dt_proj.bias, generator)


def _normed(x: Tensor, eps: float) -> Tensor:
    """An RMS norm without weights."""
    return F.rms_norm(wide(x), x.shape[-1:], eps=eps).to(x.dtype)
