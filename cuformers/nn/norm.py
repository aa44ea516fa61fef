"""Root-mean-square and layer normalisation as modules."""

import torch
from torch import Tensor, nn

from cuformers.kernels.norm_args import Norm
from cuformers.nn.kernel_module import KernelModule


class RMSNorm(KernelModule):
    """x / rms(x) * (offset + weight), computed in float32 (arXiv 1910.07467).

    `offset` is 1 in the Gemma families, whose weights are stored around zero.
    """

    def __init__(self, dim: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.offset = offset

    @property
    def args(self) -> Norm:
        """The norm as an argument of an op that normalises on the way."""
        return Norm(self.weight, self.eps, self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return self.ops.rms_norm(x, *self.args)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + norm(x)."""
        return self.ops.rms_norm_add(x, residual, *self.args)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the sum is new memory."""
        return self.ops.add_rms_norm(x, residual, *self.args)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(KernelModule):
    """(x - mean) / deviation * weight + bias, computed in float32 (arXiv 1607.06450)."""

    def __init__(self, dim: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Of x, or of x + residual: [..., dim] -> [..., dim]."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, residual)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the sum is new memory."""
        return self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, bias={self.bias is not None}"
