"""The table of a deterministic model: what is in it, when it is refused, and the gradients around its kernels."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cuformers.kernels.invariant import REPLACED
from cuformers.kernels.op import Problem
from cuformers.kernels.recompute import recomputed, with_gradient
from cuformers.kernels.table import OPS, select

H200 = Problem(device="cuda", capability=(9, 0), dtype=torch.bfloat16)


def test_inference_and_training_share_one_table() -> None:
    infer = select(H200, deterministic=True)
    train = select(Problem(device="cuda", capability=(9, 0), dtype=torch.bfloat16, mode="train"), deterministic=True)
    names = {c.op: c.implementation.name for c in infer.choices}
    assert {op for op, name in names.items() if name == "invariant"} == set(REPLACED) < {op.name for op in OPS}
    assert set(names.values()) == {"invariant", "triton"}
    assert [c.implementation.load() for c in train.choices] == [c.implementation.load() for c in infer.choices]
    assert infer.deterministic and train.deterministic and infer.can_capture
    assert not select(H200).deterministic


def test_what_can_not_be_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match=r"deterministic=True.*NVIDIA GPU.*plain PyTorch.*number of rows"):
        select(Problem(device="cpu"), deterministic=True)
    with pytest.raises(ValueError, match=r"does not take torch.float64"):
        select(Problem(device="cuda", capability=(9, 0), dtype=torch.float64), deterministic=True)
    with pytest.raises(ValueError, match=r"capability 8\.0"):
        select(Problem(device="cuda", capability=(7, 5), dtype=torch.float16), deterministic=True)
    with pytest.raises(ValueError, match=r"kernels='reference'.*'triton'"):
        select(H200, "reference", deterministic=True)


def test_the_walk_over_the_keys_is_one_for_all_numbers_of_queries() -> None:
    pytest.importorskip("triton")
    from cuformers.kernels.invariant.attention import cut

    for group, head_dim, dtype in ((1, 64, torch.bfloat16), (5, 128, torch.float16), (128, 256, torch.bfloat16)):
        cuts = [cut(T, N, group, head_dim, dtype) for T in (1, 64, 5000) for N in (1, 7, 64)]
        assert len({c.block_s for c in cuts}) == 1
        assert all(c.block_m >= max(64, group) and c.block_m == 16 * c.num_warps for c in cuts)
    assert len({cut(T, 1, 2, 128, torch.float32) for T in (1, 64, 5000)}) == 1


class Two(NamedTuple):
    total: Tensor
    count: Tensor


def values(x: Tensor, w: Tensor, power: int) -> Tensor:
    return (x * w).pow(power).detach() + 100


def formula(x: Tensor, w: Tensor, power: int) -> Tensor:
    return (x * w).pow(power)


def test_values_of_one_function_and_gradients_of_the_other() -> None:
    x, w = (torch.randn(4, requires_grad=True) for _ in range(2))
    call = with_gradient(values, formula)
    assert torch.equal(call(x, w, 3), values(x, w, 3))
    found = torch.autograd.grad(call(x, w, 3).sum(), (x, w))
    expected = torch.autograd.grad(formula(x, w, 3).sum(), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    (alone,) = torch.autograd.grad(call(x.detach(), w, 3).sum(), w)
    assert torch.equal(alone, expected[1])
    with torch.no_grad():
        assert not call(x, w, 3).requires_grad


def test_several_results_of_which_some_are_integers() -> None:
    x, unused = torch.randn(4, requires_grad=True), torch.randn(2, requires_grad=True)

    def both(x: Tensor, unused: Tensor) -> Two:
        return Two(x.square().sum(), (x > 0).sum())

    total, count = recomputed(both, both, x, unused)
    assert not count.requires_grad
    found = torch.autograd.grad(total, (x, unused), allow_unused=True)
    assert torch.equal(found[0], 2 * x.detach()) and found[1] is None
