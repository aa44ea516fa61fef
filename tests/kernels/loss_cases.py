"""Inputs and checks of linear_cross_entropy, shared by the CPU interpreter's tests and the GPU's."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .judge import TOLERANCE, Call, Case, error, poisoned, randn


@dataclass(frozen=True)
class HeadShape:
    """T tokens of width H, V words; how logits are bent; which part of the labels is ignored."""

    T: int
    H: int
    V: int
    softcap: float | None = None
    scale: float = 1.0
    ignored: float = 0.3

    def __str__(self) -> str:
        return f"{self.T}x{self.H}x{self.V}-softcap{self.softcap}-scale{self.scale:g}-ignored{self.ignored:g}"

    def make(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(x, weight, labels, weights); logits are about 2 wide, and some weights are 0 or negative."""
        torch.manual_seed(self.T + self.V)
        x, weight = randn(self.T, self.H, dtype=dtype, device=device), randn(self.V, self.H, dtype=dtype, device=device)
        labels = torch.randint(0, self.V, (self.T,)).masked_fill(torch.rand(self.T) < self.ignored, -100)
        labels[0] = self.V - 1 if self.ignored < 1 else -100
        weights = randn(self.T, dtype=torch.float32, device=device)
        weights[::5] = 0
        return x, weight * (2 / self.H**0.5), labels.to(device), weights

    @property
    def options(self) -> dict[str, Any]:
        return {"softcap": self.softcap, "scale": self.scale}


SMALL_HEADS = (
    HeadShape(1, 48, 300, ignored=0),
    HeadShape(37, 32, 517),
    HeadShape(70, 24, 333, softcap=3.0, scale=1.5),
    HeadShape(9, 16, 7),
    HeadShape(5, 16, 40, ignored=1),
)
REAL_HEADS = (
    HeadShape(1, 1024, 151_936, ignored=0),
    HeadShape(300, 1024, 151_936),
    HeadShape(129, 2304, 256_000, softcap=30.0),
    HeadShape(257, 768, 50_257, scale=0.125),
)
WAYS = ("total", "weighted", "tokens", "all", "frozen")
"""What is differentiated: the total (with weights), each token's nll, all results; the total for x alone."""


def token_losses(shapes: tuple[HeadShape, ...] = SMALL_HEADS) -> list[Case]:
    """linear_cross_entropy without gradients, with and without weights and entropy."""

    def case(shape: HeadShape, full: bool) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> Call:
            *given, weights = shape.make(dtype, device)
            return Call((*given, weights if full else None), {"entropy": full} | shape.options)

        return Case("linear_cross_entropy", f"{shape}-{'full' if full else 'bare'}", make)

    return [case(shape, full) for shape in shapes for full in (False, True)]


def check_loss_gradients(shape: HeadShape, way: str, dtype: torch.dtype, device: torch.device) -> None:
    """Values and gradients against the reference's in float32."""
    from cuformers.kernels.linear_cross_entropy import reference, triton

    x, weight, labels, weights = shape.make(dtype, device)
    by_nll, by_entropy = (randn(shape.T, dtype=torch.float32, device=device) for _ in range(2))
    told = []
    for function, lift in ((triton.linear_cross_entropy, False), (reference.linear_cross_entropy, True)):
        leaves = [(t.float() if lift else t).detach().clone().requires_grad_() for t in (x, weight, weights)]
        leaves[1].requires_grad_(way != "frozen")
        given = leaves[2] if way in ("weighted", "all") else None
        with poisoned():
            options = {"entropy": way == "all", "ahead": way != "tokens"} | shape.options
            out = function(leaves[0], leaves[1], labels, given, **options)
            target = out.total * 0.25
            if way in ("tokens", "all"):
                target = (out.nll * by_nll).sum() + (target if way == "all" else 0.0)
            if out.entropy is not None:
                target = target + (out.entropy * by_entropy).sum()
            target.backward()
        told.append([*(t for t in out if t is not None), *(leaf.grad for leaf in leaves)])
        assert (leaves[1].grad is None) == (way == "frozen") and (leaves[2].grad is None) == (given is None)
    for place, (found, right) in enumerate(zip(*told, strict=True)):
        if right is not None:
            assert found.shape == right.shape
            assert error(found, right) <= 2 * TOLERANCE[dtype], f"{place} of {shape}, {way}: {error(found, right):.2e}"


def check_losses_twice(dtype: torch.dtype, device: torch.device) -> None:
    """Two backward passes give each the same bits; without tokens there is nothing, with a gradient of zeros."""
    from cuformers.kernels.linear_cross_entropy.triton import linear_cross_entropy

    x, weight, labels, _ = HeadShape(37, 32, 517).make(dtype, device)
    leaves = x.requires_grad_(), weight.requires_grad_()
    total = linear_cross_entropy(*leaves, labels).total * 0.3
    first, second = (torch.autograd.grad(total, leaves, retain_graph=True) for _ in range(2))
    again = torch.autograd.grad(linear_cross_entropy(*leaves, labels).total * 0.3, leaves)
    for a, b, c in zip(first, second, again):
        assert a.any() and torch.equal(a, b) and torch.equal(a, c)
    with poisoned():
        none = linear_cross_entropy(x[:0], weight, labels[:0], entropy=True)
    assert none.nll.shape == (0,) and none.total == 0
    assert not torch.autograd.grad(none.total, weight)[0].any()


def check_losses_under_autocast(device: torch.device) -> None:
    """Parameters in float32 get gradients in float32, of products in bfloat16, as those of a linear layer."""
    from cuformers.kernels.linear_cross_entropy import reference, triton

    told = []
    for function in (triton.linear_cross_entropy, reference.linear_cross_entropy):
        x, weight, labels, _ = HeadShape(37, 32, 517).make(torch.float32, device)
        leaves = x.requires_grad_(), weight.requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            total = function(*leaves, labels).total
        told.append((total, *torch.autograd.grad(total, leaves)))
    for found, right in zip(*told):
        assert found.dtype == right.dtype == torch.float32
        assert 1e-6 < error(found, right.detach()) < TOLERANCE[torch.bfloat16] or found.dim() == 0
    torch.testing.assert_close(told[0][0], told[1][0], rtol=1e-5, atol=0)
