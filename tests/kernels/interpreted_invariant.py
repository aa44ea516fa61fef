"""The invariant products in Triton's CPU interpreter. Run by test_invariant_linear.py in a process of its own."""

import pytest
import torch

from cuformers.kernels.invariant_linear import reference, triton
from cuformers.kernels.norm_args import Norm

from .invariance import Operands, check_cuts, check_numbers_of_rows
from .invariant_ops import Heads, check_attention, check_rope, check_rows, nearly
from .judge import error
from .moe_cases import ExpertShape, check_alone, check_invariant_gradients

CPU = torch.device("cpu")


@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("K", [1024, 600])
def test_any_number_of_rows_and_any_cut(K: int, activation: str) -> None:
    """Without exponentials, whose last bit depends in NumPy on the place within the array."""
    operands = Operands(70, 24, K, activation=activation, dtype=torch.bfloat16, device=CPU)
    assert operands.count == (2 if K == 1024 and activation == "none" else 1)
    check_numbers_of_rows(operands, (1, 2, 16, 17, 64, 65))
    check_cuts(operands)


def test_more_rows_than_partial_sums_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = Operands(70, 24, 1024, dtype=torch.bfloat16, device=CPU)
    monkeypatch.setattr(triton, "PARTIAL_ROWS", 32)
    check_cuts(operands)


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).div_(shape[-1] ** 0.5).requires_grad_() for shape in shapes]


def test_gradients_are_those_of_the_reference_and_values_those_of_inference() -> None:
    x, weight, bias, norm, residual = inputs = leaves((5, 40), (12, 40), (12,), (40,), (5, 12))
    results = []
    for module in (triton, reference):
        y = module.invariant_linear(x, weight, bias, norm=Norm(norm, 1e-5, 1.0), residual=residual, scale=0.5)
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    with torch.no_grad():
        again = triton.invariant_linear(x, weight, bias, norm=Norm(norm, 1e-5, 1.0), residual=residual, scale=0.5)
    assert torch.equal(results[0][0], again)
    for found, expected in zip(*results, strict=True):
        assert error(found, expected) < 1e-5


def test_gradients_of_the_gated_product() -> None:
    x, weight, bias, norm = inputs = leaves((5, 40), (24, 40), (24,), (40,))
    results = []
    for module in (triton, reference):
        y = module.invariant_gated_linear(x, weight, bias, "gelu", norm=Norm(norm, 1e-5, 0.0))
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for found, expected in zip(*results, strict=True):
        assert error(found, expected) < 1e-5


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    x, weight = leaves((3, 16), (8, 16))
    triton.invariant_linear(x.detach(), weight).sum().backward()
    assert x.grad is None and weight.grad is not None
    assert error(weight.grad, x.detach().sum(0).expand(8, 16)) < 1e-5


def test_unaligned_rows_and_no_rows() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 16), torch.randn(3 * 16 + 1)[1:].view(3, 16)
    assert x.data_ptr() % 16 and error(triton.invariant_linear(x, weight), x @ weight.T) < 1e-5
    assert triton.invariant_linear(x[:0], weight).shape == (0, 8)


@pytest.mark.parametrize("heads", [Heads(4, 2, 32), Heads(2, 1, 16, window=20, softcap=20.0)], ids=str)
def test_how_a_sequence_is_cut_changes_no_result(heads: Heads) -> None:
    check_attention(heads, 70, torch.float32, CPU, nearly, (1, 33))


def test_rotation_with_and_without_a_cache() -> None:
    check_rope(Heads(6, 3, 32), torch.float32, CPU, nearly, (1, 5, 33))


def test_ops_that_work_a_row_at_a_time() -> None:
    check_rows(torch.float32, CPU, nearly, (1, 9), 300, 40)


def test_a_token_does_not_depend_on_the_tokens_beside_it() -> None:
    check_alone(ExpertShape(70, 5, 2, 48, 40, activation="relu"), torch.float32, CPU, nearly)


@pytest.mark.parametrize("extra", [(), ("clamped_swiglu", True, True)], ids=str)
def test_gradients_of_routed_experts(extra: tuple) -> None:
    check_invariant_gradients(ExpertShape(9, 5, 2, 48, 40, "random", *extra), CPU)
