"""What batch invariance means: a row's bits, wherever it stands and whoever computes it."""

from collections.abc import Iterable

import torch
from torch import Tensor

from cuformers.kernels.invariant_linear.config import Cut, cuts, splits
from cuformers.kernels.invariant_linear.triton import product

from .judge import poisoned, randn, varied


class Operands:
    """A weight, and the rows that all products are taken from."""

    def __init__(
        self, rows: int, N: int, K: int, *, activation: str = "none", dtype: torch.dtype, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        make = {"dtype": dtype, "device": device}
        self.activation, gated = activation, activation != "none"
        self.x = randn(rows, K, **make)
        self.weight = randn(2 * N if gated else N, K, **make) / K**0.5
        self.bias = randn(self.weight.shape[0], **make)
        self.residual = None if gated else randn(rows, N, **make)
        self.scale = 1.0 if gated else 0.37
        self.count = 1 if gated else splits(N, K)

    def product(self, rows: slice | Tensor, cut: Cut | None = None) -> Tensor:
        """The product of some of the rows, on poisoned memory."""
        residual = None if self.residual is None else self.residual[rows]
        options = {"scale": self.scale, "activation": self.activation, "cut": cut}
        with poisoned():
            return product(self.x[rows], self.weight, self.bias, residual=residual, **options)


def check_numbers_of_rows(operands: Operands, sizes: Iterable[int]) -> None:
    """T rows give the first T rows of all; in another order they give the same rows, in that order."""
    expected = operands.product(slice(None))
    assert varied(expected)
    for T in sizes:
        assert torch.equal(operands.product(slice(0, T)), expected[:T]), f"{T} rows are not the first {T} rows of all"
    order = torch.randperm(len(operands.x)).to(operands.x.device)
    assert torch.equal(operands.product(order), expected[order]), "a row's bits depend on its place"


def check_cuts(operands: Operands) -> None:
    """Every cut that the model may choose gives the same bits."""
    first, *others = cuts(operands.count, gated=operands.activation != "none")
    expected = operands.product(slice(None), first)
    for cut in others:
        assert torch.equal(operands.product(slice(None), cut), expected), f"other bits by {cut}"
