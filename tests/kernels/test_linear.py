"""linear, gated_linear and gated_activation: references against the unfused formula; the rule for block sizes."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from cuformers.kernels.gated_linear.reference import gated_activation, gated_linear
from cuformers.kernels.linear.config import MmaConfig, fma_config, mma_config
from cuformers.kernels.linear.reference import linear
from cuformers.kernels.norm.reference import rms_norm
from cuformers.kernels.norm_args import Norm

pytest.importorskip("triton")

from cuformers.kernels import activation_triton
from cuformers.kernels.linear import mma_kernel, skinny

from . import warpgroups
from .judge import error, poisoned

FUNCTIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: x * (x > 0),
}


def inputs(outputs: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x, w, b, g, r = (
        torch.randn(*s, dtype=torch.float64) for s in ((4, 6), (outputs, 6), (outputs,), (6,), (4, outputs))
    )
    return x, w, b, g, r


def test_linear_is_the_formula() -> None:
    x, w, b, g, r = inputs(5)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (1 + g)
    expected = torch.einsum("tk,nk->tn", normed, w) * 0.25 + b * 0.25 + r
    got = linear(x, w, b, norm=Norm(g, 1e-3, 1.0), residual=r, scale=0.25)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(linear(x, w), torch.einsum("tk,nk->tn", x, w))


@pytest.mark.parametrize("activation", list(FUNCTIONS))
def test_gated_linear_is_the_formula(activation: str) -> None:
    x, w, b, g, _ = inputs(10)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * g
    gate, up = F.linear(normed, w[:5], b[:5]), F.linear(normed, w[5:], b[5:])
    got = gated_linear(x, w, b, activation, norm=Norm(g, 1e-3))
    torch.testing.assert_close(got, FUNCTIONS[activation](gate) * up)


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activation='swish'.*silu"):
        gated_activation(torch.ones(1, 2), "swish")


def test_gradients() -> None:
    x, w, b, g, r = (t.requires_grad_() for t in inputs(4))
    assert torch.autograd.gradcheck(
        lambda x, w, b, g, r: linear(x, w, b, norm=Norm(g, 0.1), residual=r, scale=2.0), (x, w, b, g, r)
    )
    assert torch.autograd.gradcheck(lambda x, w, b, g: gated_linear(x, w, b, "silu", norm=Norm(g, 0.1)), (x, w, b, g))


@pytest.mark.parametrize(
    ("N", "K"),
    [(4096, 1024), (1024, 2048), (1024, 3072), (151936, 1024), (4096, 12288), (896, 4864), (7, 5), (32000, 288)],
)
def test_every_cut_fits_the_kernel(N: int, K: int) -> None:
    """Powers of two, K covered, and a thread's weights within its registers."""
    for gated in (False, True):
        for T in (1, 2, 4):
            cut = fma_config(N, K, T, gated=gated)
            assert all(size & (size - 1) == 0 for size in cut)
            columns = -(-K // cut.block_k) * cut.block_k
            assert columns * cut.block_n * 2 * (1 + gated) / (32 * cut.num_warps) <= 192
        cut = mma_config(N, K, gated=gated)
        chunk = mma_kernel.BLOCK_N.value * mma_kernel.BLOCK_K.value
        assert cut.num_warps in (4, 8) and chunk * 2 * (1 + gated) * cut.ahead / 32 <= 256


class Program:
    """Stands for a compiled Gluon kernel: runs its text."""

    def __getitem__(self, grid: tuple[int]) -> "Program":
        self.programs = grid[0]
        return self

    def __call__(self, *args: Any, num_warps: int, **constants: Any) -> None:
        pointers = [warpgroups.Pointer.to(a) if isinstance(a, torch.Tensor) else a for a in args]
        warpgroups.run([activation_triton, mma_kernel], "mma_kernel", self.programs, *pointers, **constants)


@pytest.mark.parametrize("cut", [MmaConfig(2, 1), MmaConfig(4, 2), MmaConfig(4, 9)], ids=str)
@pytest.mark.parametrize("activation", ["none", *FUNCTIONS])
@pytest.mark.parametrize(("T", "N", "K"), [(3, 40, 300), (8, 16, 128), (16, 21, 1000)])
def test_the_text_of_the_tensor_core_kernel_says_what_the_reference_does(
    T: int, N: int, K: int, activation: str, cut: MmaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny, "mma_kernel", Program())
    torch.manual_seed(0)
    gated = activation != "none"
    rows = N * (1 + gated)
    x, w, b, g = torch.randn(T, K), torch.randn(rows, K) / K**0.5, torch.randn(rows), torch.randn(K)
    with poisoned():
        if gated:
            found = skinny.skinny(x, w, b, activation=activation, cut=cut)
            assert error(found, gated_linear(x, w, b, activation)) < 1e-5
            return
        monkeypatch.setattr(skinny, "rms_norm", rms_norm)
        residual = torch.randn(T, N)
        found = skinny.skinny(x, w, b, norm=Norm(g, 1e-6), residual=residual, scale=0.3, cut=cut)
        assert error(found, linear(x, w, b, norm=Norm(g, 1e-6), residual=residual, scale=0.3)) < 1e-5
        assert error(skinny.skinny(x, w, None, cut=cut), linear(x, w)) < 1e-5
