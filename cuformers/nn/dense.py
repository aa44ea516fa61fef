"""Linear maps named `dense` with what follows them, as encoders of BERT's kind have them."""

from collections.abc import Callable

from torch import Tensor, nn

from cuformers.nn.kernel_module import KernelModule
from cuformers.nn.norm import LayerNorm
from cuformers.nn.project import project


class DenseActivation(KernelModule):
    """activation(dense(x))."""

    def __init__(self, inputs: int, outputs: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        return self.activation(project(self.ops, x, (self.dense,)))


class DenseNorm(KernelModule):
    """norm(dense(x) + residual): where the residual stream itself is normalised (post-norm)."""

    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)
        self.LayerNorm = LayerNorm(outputs, eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, inputs], [T, outputs] -> [T, outputs]."""
        return self.LayerNorm(project(self.ops, x, (self.dense,)), residual)
