"""The table of a deterministic model: what is in it, when it is refused, and the gradients around its kernels."""

import re
from typing import Any, NamedTuple

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


H200_ONLY = (9, 0)
HALF_CUTS = [(64, 1), (128, 4), (80, 5), (256, 2), (128, 71)]
"""(head_dim, query heads of a kv head)."""


def cuts(on: tuple[int, int], head_dim: int, group: int, dtype: torch.dtype) -> set[Any]:
    """Every cut that may be chosen."""
    from cuformers.kernels.invariant.attention import cut

    return {cut(T, N, group, head_dim, dtype, on) for T in (1, 63, 64, 5000) for N in (1, 7, 64)}


@pytest.mark.parametrize(("head_dim", "group"), HALF_CUTS)
def test_tiles_of_keys_are_the_same_for_all_numbers_of_queries(head_dim: int, group: int) -> None:
    pytest.importorskip("triton")
    assert len({c.block_s for c in cuts(H200_ONLY, head_dim, group, torch.bfloat16)}) == 1
    assert len(cuts(H200_ONLY, head_dim, group, torch.float32)) == 1
    assert len(cuts((8, 0), head_dim, group, torch.bfloat16)) == 1


def compiled(on: tuple[int, int], head_dim: int, group: int, one: Any) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cuformers.kernels.chunk_attention.kernel import chunk_kernel

    constants = {
        "HKV": 2, "G": group, "D": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "PAGE": 64,
        "BLOCK_M": one.block_m, "BLOCK_S": one.block_s, "STAGES": one.stages, "WINDOW": True, "SOFTCAP": False,
        "SINKS": False, "SCALED": False, "UPCAST": False, "PDL": on >= (9, 0),
    }  # fmt: skip
    known = {f"{name}_ptr": "*bf16" for name in ("q", "k", "v", "sinks", "out")} | {"scale": "fp32", "softcap": "fp32"}
    known |= {f"{name}_ptr": "*i32" for name in ("tables", "bounds", "rows", "lengths")}
    signature = {n: "constexpr" if n in constants else known.get(n, "i32") for n in chunk_kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t[0] == "*" or t == "i32"}
    source = ASTSource(chunk_kernel, signature, constants, aligned)
    options = {"num_warps": one.num_warps, "num_stages": 1}
    return triton.compile(source, target=GPUTarget("cuda", 10 * on[0] + on[1], 32), options=options).asm


def warps(ir: str) -> set[tuple[str, str]]:
    """(warps along the rows, warps along the keys) of every matrix that is reduced."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
    reduced = {layouts[name] for name in re.findall(r"\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)", ir)}
    return {found for layout in reduced for found in re.findall(r"warpsPerCTA = \[(\d+), (\d+)\]", layout)}


@pytest.mark.parametrize(("head_dim", "group"), HALF_CUTS)
def test_on_hopper_every_tile_takes_the_sums_of_a_row_within_a_warp(head_dim: int, group: int) -> None:
    pytest.importorskip("triton")
    for one in cuts(H200_ONLY, head_dim, group, torch.bfloat16):
        asm = compiled(H200_ONLY, head_dim, group, one)
        assert warps(asm["ttgir"]) == {(str(one.num_warps), "1")} and "wgmma.mma_async" in asm["ptx"]


@pytest.mark.parametrize("on", [(8, 0), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_full_tiles_and_those_on_the_diagonal_round_alike(on: tuple[int, int], head_dim: int) -> None:
    """Every exponential is followed by one fused product and sum, in each of the kernel's loops."""
    pytest.importorskip("triton")
    if head_dim == 256 and on == (12, 0):
        pytest.skip("refused there")
    for one in cuts(on, head_dim, 2, torch.bfloat16):
        ptx = compiled(on, head_dim, 2, one)["ptx"]
        assert ptx.count("fma.rn.f32") == ptx.count("ex2.approx") > 0


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
