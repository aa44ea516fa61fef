"""The specification of routing and experts against plain formulas, and how the products are cut."""

import pytest
import torch
from torch.nn import functional as F

from cuformers.kernels.experts.config import few_down, few_up, gradient, grouped, rows_of_tile
from cuformers.kernels.experts.reference import experts
from cuformers.kernels.moe_route.reference import moe_route

from .moe_cases import ExpertShape, operands, options

CPU = torch.device("cpu")


def test_each_token_goes_through_its_own_experts() -> None:
    torch.manual_seed(0)
    x, gate_up, down, weights, ids, residual = operands(ExpertShape(9, 5, 3, 8, 6), torch.float32, CPU)
    y = experts(x, gate_up, down, weights, ids, "silu", residual=residual, scale=0.5)
    for t in range(9):
        total = torch.zeros(8)
        for weight, e in zip(weights[t], ids[t].tolist()):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            total += weight * (down[e] @ (F.silu(gate) * up))
        torch.testing.assert_close(y[t], residual[t] + 0.5 * total)


def test_biases_interleaved_weights_and_the_clamped_activation() -> None:
    torch.manual_seed(0)
    shape = ExpertShape(9, 5, 3, 8, 6, "random", "clamped_swiglu", biases=True, interleaved=True)
    x, gate_up, down, weights, ids, _ = operands(shape, torch.float32, CPU)
    given = options(shape, torch.float32, CPU)
    y = experts(x, gate_up, down, weights, ids, "clamped_swiglu", **given)
    clamped = 0
    for t in range(9):
        total = torch.zeros(8)
        for weight, e in zip(weights[t], ids[t].tolist()):
            opened = x[t] @ gate_up[e] + given["biases"].gate_up[e]
            gate, up = opened[::2], opened[1::2]
            clamped += int((gate > 7).sum() + (up.abs() > 7).sum())
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            total += weight * ((gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ down[e] + given["biases"].down[e])
        torch.testing.assert_close(y[t], total)
    assert clamped > 3


def test_no_tokens() -> None:
    x, gate_up, down, weights, ids, _ = operands(ExpertShape(0, 5, 3, 8, 6), torch.float32, CPU)
    assert experts(x, gate_up, down, weights, ids, "silu").shape == (0, 8)


def test_gradients_numerically() -> None:
    torch.manual_seed(0)
    x, gate_up, down, weights, ids, residual = operands(ExpertShape(4, 3, 2, 5, 4), torch.float64, CPU)
    leaves = [t.double().requires_grad_() for t in (x, gate_up, down, weights, residual)]
    assert torch.autograd.gradcheck(
        lambda x, g, d, w, r: experts(x, g, d, w, ids, "gelu", residual=r, scale=0.5), leaves
    )
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: moe_route(x, 3, normalise=True).weights, (logits,))


def test_an_expert_without_tokens_gets_zeros() -> None:
    x, gate_up, down, weights, ids, _ = operands(ExpertShape(6, 5, 2, 8, 6, "first"), torch.float32, CPU)
    experts(x, gate_up.requires_grad_(), down.requires_grad_(), weights, ids, "silu").sum().backward()
    assert gate_up.grad is not None and down.grad is not None
    assert not gate_up.grad[:3].any() and not down.grad[:3].any() and gate_up.grad[3:].any()


def test_routes_are_the_largest_logits_and_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [torch.nan, 0.0, -torch.inf, 1.0]])
    weights, ids = moe_route(logits, 3, normalise=False)
    assert ids.tolist() == [[1, 2, 3], [3, 1, 0]]
    torch.testing.assert_close(weights[0], logits[0].softmax(0)[[1, 2, 3]])
    assert weights[1].isnan().all()
    torch.testing.assert_close(moe_route(logits[:1], 3, normalise=True).weights.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("on", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_cut_fits_the_shared_memory(on: tuple[int, int], dtype: torch.dtype) -> None:
    room = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(on, 99) * 1024
    for block_m in (16, 32, 64, 128):
        for gated in (False, True):
            cut = grouped(block_m, gated=gated, dtype=dtype, on=on)
            width = cut.block_n * (2 if gated else 1)
            assert cut.stages * (block_m + width) * cut.block_k * dtype.itemsize < room and cut.stages >= 2
    cut = gradient(dtype, on)
    assert cut.stages * (cut.block_m + cut.block_n) * cut.block_k * dtype.itemsize < room


def test_tiles_grow_with_what_an_expert_gets() -> None:
    sizes = [rows_of_tile(T * 8, 128, torch.bfloat16) for T in (5, 64, 1024, 16384)]
    assert sizes == [16, 16, 64, 128]
    assert rows_of_tile(16384 * 8, 128, torch.float32) == 32


@pytest.mark.parametrize(("hidden", "width", "k"), [(2048, 768, 8), (4096, 14336, 2), (2048, 1024, 8), (2048, 1408, 4)])
def test_the_weights_of_few_tokens_stay_in_registers(hidden: int, width: int, k: int) -> None:
    up, down = few_up(width, hidden, k, 132), few_down(width, k)
    assert up.block_n * 2 * hidden * 2 / (32 * up.num_warps) <= 256
    assert down.at_once * down.block_n * width * 2 / (32 * down.num_warps) <= 256 or down.at_once == 1
    assert 1 <= down.at_once <= k
