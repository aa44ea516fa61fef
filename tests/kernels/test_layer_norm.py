"""Layer norm: the reference against PyTorch's own in float64, its rounding and its gradients."""

import pytest
import torch
from torch.nn import functional as F

from cuformers.kernels.layer_norm.reference import add_layer_norm, layer_norm


@pytest.mark.parametrize("biased", [False, True])
def test_is_pytorchs(biased: bool) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 7, 40, dtype=torch.float64) * 3 + 100
    weight, bias = torch.randn(2, 40, dtype=torch.float64)
    bias = bias if biased else None
    torch.testing.assert_close(layer_norm(x, weight, bias, 0.01), F.layer_norm(x, (40,), weight, bias, 0.01))
    expected = F.layer_norm(x + residual, (40,), weight, bias, 0.01)
    torch.testing.assert_close(layer_norm(x, weight, bias, 0.01, residual), expected)


def test_sums_round_as_the_unfused_path_does() -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 5, 16).bfloat16()
    weight, bias = torch.randn(2, 16).bfloat16()
    y, total = add_layer_norm(x, residual, weight, bias, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, layer_norm(total, weight, bias, 1e-6))
    assert torch.equal(y, layer_norm(x, weight, bias, 1e-6, residual))


def test_half_precision_is_rounded_once() -> None:
    torch.manual_seed(0)
    x, (weight, bias) = torch.randn(4, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    exact = layer_norm(x.float(), weight.float(), bias.float(), 1e-6)
    assert torch.equal(layer_norm(x, weight, bias, 1e-6), exact.bfloat16())


def test_gradients() -> None:
    torch.manual_seed(0)
    x, r = torch.randn(2, 3, 5, dtype=torch.float64).unbind()
    w, b = torch.randn(2, 5, dtype=torch.float64).unbind()
    args = [t.requires_grad_() for t in (x, r, w, b)]
    assert torch.autograd.gradcheck(lambda x, r, w, b: layer_norm(x, w, b, 0.1, r), args)
    assert torch.autograd.gradcheck(lambda x, r, w, b: add_layer_norm(x, r, w, b, 0.1), args)
