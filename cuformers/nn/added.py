"""A linear map to which something is added: what a replaced leaf is, as far as the decoder has to know."""

from collections.abc import Hashable

import torch.nn.functional as F
from torch import Tensor, nn


class AddedLinear(nn.Linear):
    """y = x @ weight.T + bias + added(x), whose weight and bias keep the names of the `nn.Linear` they were taken from.

    While `adding` is empty it is that linear map and nothing else.
    """

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.training = base.training

    @property
    def adding(self) -> tuple[Hashable, ...]:
        """Says what is added now; empty: nothing. A captured step is of use as long as it stays the same."""
        raise NotImplementedError

    def added(self, x: Tensor) -> Tensor:
        """What is added for x [..., in_features]: [..., out_features] in x's dtype; not where `adding` is empty."""
        raise NotImplementedError

    def add_to(self, y: Tensor, x: Tensor, scale: float) -> None:
        """y [T, out_features] += scale * added(x), in place and without gradients."""
        y.add_(self.added(x), alpha=scale)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y + self.added(x) if self.adding else y
