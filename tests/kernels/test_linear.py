"""linear, gated_linear and gated_activation: references against the unfused formula; the rule for block sizes."""

import pytest
import torch
from torch.nn import functional as F

from cuformers.kernels.gated_linear.reference import gated_activation, gated_linear
from cuformers.kernels.linear.config import FMA_ROWS, MAX_ROWS, config
from cuformers.kernels.linear.reference import linear
from cuformers.kernels.norm_args import Norm

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


@pytest.mark.parametrize("T", [1, 2, 4, 5, 8, 16])
@pytest.mark.parametrize(
    ("N", "K"),
    [(4096, 1024), (1024, 2048), (1024, 3072), (151936, 1024), (4096, 12288), (896, 4864), (7, 5), (32000, 288)],
)
def test_every_cut_fits_the_kernel(N: int, K: int, T: int) -> None:
    """Powers of two, K covered, and a thread's weights within its registers."""
    assert T <= MAX_ROWS
    for gated in (False, True):
        cut = config(N, K, T, gated=gated)
        for size in (cut.block_n, cut.block_k, cut.slices, cut.num_warps):
            assert size & (size - 1) == 0
        columns = -(-K // cut.block_k) * cut.block_k if T <= FMA_ROWS else cut.slices * cut.block_k
        held = columns * cut.block_n * 2 * (1 + gated) / (32 * cut.num_warps)
        assert held <= 192 and (T <= FMA_ROWS) == (cut.slices == 1)
