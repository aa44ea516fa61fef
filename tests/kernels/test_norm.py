"""RMS norms: the reference against the formula written out, and its gradients."""

import pytest
import torch

from cuformers.kernels.norm.reference import add_rms_norm, rms_norm, rms_norm_add


def naive(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Row by row in Python's own arithmetic."""
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]).tolist():
        rms = (sum(v * v for v in row) / len(row) + eps) ** 0.5
        rows.append([v / rms * (offset + w) for v, w in zip(row, weight.double().tolist())])
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_is_the_formula(offset: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 7), torch.randn(7)
    torch.testing.assert_close(rms_norm(x, weight, 0.01, offset).double(), naive(x, weight, 0.01, offset))


def test_sums_round_as_the_unfused_path_does() -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 5, 16).bfloat16().unbind()
    weight = torch.randn(16).bfloat16()
    y, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(x + residual, weight, 1e-6))
    assert torch.equal(rms_norm_add(x, residual, weight, 1e-6), residual + rms_norm(x, weight, 1e-6))


def test_half_precision_is_rounded_once() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight.float(), 1e-6).bfloat16())


def test_gradients() -> None:
    torch.manual_seed(0)
    x, r = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True).unbind()
    w = torch.randn(5, dtype=torch.float64, requires_grad=True)
    for function in (
        lambda x, r, w: rms_norm(x, w, 0.1, 1.0),
        lambda x, r, w: add_rms_norm(x, r, w, 0.1),
        lambda x, r, w: rms_norm_add(x, r, w, 0.1),
    ):
        args = [t.detach().requires_grad_() for t in (x, r, w)]
        assert torch.autograd.gradcheck(function, args)
