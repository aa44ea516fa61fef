"""Routing, and the experts' product under routings of all kinds, with gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuformers.kernels.experts import Biases
from cuformers.kernels.op import Problem
from cuformers.kernels.table import reference, select

from .judge import TOLERANCE, Call, Case, error, poisoned, randn, varied


class ExpertShape(NamedTuple):
    """Sizes of a mixture, and how its tokens are spread over it."""

    T: int
    E: int
    k: int
    H: int
    width: int
    routing: str = "random"
    activation: str = "silu"
    biases: bool = False
    interleaved: bool = False

    def __str__(self) -> str:
        more = "-biases" * self.biases + "-interleaved" * self.interleaved
        return "x".join(map(str, self[:5])) + f"-{self.routing}-{self.activation}{more}"

    @property
    def clamped(self) -> bool:
        return self.activation == "clamped_swiglu"


SMALL = (
    ExpertShape(1, 8, 2, 48, 24),
    ExpertShape(1, 5, 3, 100, 56, "first", "gelu_tanh"),
    ExpertShape(3, 6, 2, 80, 272),
    ExpertShape(4, 3, 3, 64, 40, "first"),
    ExpertShape(5, 7, 3, 48, 24),
    ExpertShape(40, 5, 2, 48, 40, "first", "gelu"),
    ExpertShape(33, 20, 1, 40, 24, "one", "relu"),
    ExpertShape(70, 4, 2, 100, 56, "few", "gelu_tanh"),
    ExpertShape(1, 6, 2, 48, 40, activation="clamped_swiglu", biases=True, interleaved=True),
    ExpertShape(41, 5, 3, 72, 56, "few", "clamped_swiglu", True, True),
    ExpertShape(9, 4, 2, 48, 40, biases=True),
    ExpertShape(9, 4, 2, 48, 40, activation="relu", interleaved=True),
)
"""Few tokens and many; experts that all tokens choose, and that none chooses."""


def choices(shape: ExpertShape) -> Tensor:
    """ids [T, k]: "random", the "first" k for all, all in "one" expert, or all in a "few"."""
    among = {"random": shape.E, "first": shape.k, "one": 1, "few": min(shape.E, shape.k + 1)}[shape.routing]
    offset = shape.E - among  # the last ones, so that leading experts are without tokens
    ranked = torch.rand(shape.T, among).argsort(1)[:, : shape.k]
    return (ranked + offset).int()


def operands(shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """(x, gate_up, down, weights, ids, residual)."""
    T, E, k, H, width = shape[:5]
    make = {"dtype": dtype, "device": device}
    weights = torch.randn(T, k).softmax(1).to(device)
    spread = 3.0 if shape.clamped else 1.0  # so that both clamps are met
    gate_up, down = randn(E, 2 * width, H, **make) * (spread / H**0.5), randn(E, H, width, **make) / width**0.5
    if shape.interleaved:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    return randn(T, H, **make), gate_up, down, weights, choices(shape).to(device), randn(T, H, **make)


def options(shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """biases and interleaved, where the shape has them."""
    found: dict[str, Any] = {"interleaved": True} if shape.interleaved else {}
    if shape.biases:
        make = {"dtype": dtype, "device": device}
        found["biases"] = Biases(randn(shape.E, 2 * shape.width, **make), randn(shape.E, shape.H, **make))
    return found


def routes() -> list[Case]:
    """moe_route: few experts and many, ties, NaN, infinities, all experts chosen."""

    def maker(T: int, E: int, k: int, normalise: bool) -> Callable[[torch.dtype, torch.device], Call]:
        def make(dtype: torch.dtype, device: torch.device) -> Call:
            logits = randn(T, E, dtype=torch.float32, device=device)
            logits[0] = logits[0].round()  # ties
            if T > 3:
                logits[1, E // 2] = torch.nan
                logits[2, : E // 2] = -torch.inf
                logits[3] = 0.5
            return Call((logits.to(dtype), k), {"normalise": normalise})

        return make

    shapes = ((1, 8, 2, True), (5, 60, 4, False), (7, 128, 8, True), (4, 3, 3, False), (6, 500, 10, True))
    return [Case("moe_route", "x".join(map(str, shape)), maker(*shape)) for shape in shapes]


def mixtures(shapes: tuple[ExpertShape, ...] = SMALL) -> list[Case]:
    """experts, bare and with a residual and a scale."""

    def maker(shape: ExpertShape, full: bool) -> Callable[[torch.dtype, torch.device], Call]:
        def make(dtype: torch.dtype, device: torch.device) -> Call:
            *inputs, residual = operands(shape, dtype, device)
            given = options(shape, dtype, device) | ({"residual": residual, "scale": 0.5} if full else {})
            return Call((*inputs, shape.activation), given)

        return make

    def replaced(dtype: torch.dtype, device: torch.device) -> Call:
        *inputs, residual = operands(SMALL[1], dtype, device)
        return Call((*inputs, "gelu"), {"residual": residual, "gate": lambda opened: opened[:, : SMALL[1].width] * 0.5})

    other = [Case("experts", "another-gate", replaced)] if shapes is SMALL else []
    ways = {"bare": False, "full": True}
    return other + [Case("experts", f"{s}-{name}", maker(s, full)) for s in shapes for name, full in ways.items()]


def check_order(P: int, E: int, block_m: int, device: torch.device) -> None:
    """The sort by expert, its bounds and tiles, against torch's own, for spread, equal and absent choices."""
    from cuformers.kernels.experts.order import sort_pairs

    torch.manual_seed(P + E)
    for ids in (torch.randint(0, E, (P, 1)), torch.full((P, 1), E - 1), torch.randint(0, E, (P, 1)) // 2):
        with poisoned():
            found = sort_pairs(ids.int().to(device), E, block_m)
        chosen, order = ids.flatten().sort(stable=True)
        bounds = torch.searchsorted(chosen, torch.arange(E + 1)).tolist()
        assert torch.equal(found.order.cpu().long(), order) and found.bounds.tolist() == bounds
        assert torch.equal(found.order[found.places.long()].cpu(), torch.arange(P, dtype=torch.int32))
        tiles = [
            [e, at, min(at + block_m, bounds[e + 1])]
            for e in range(E)
            for at in range(bounds[e], bounds[e + 1], block_m)
        ]
        assert found.tiles[: len(tiles)].tolist() == tiles and (found.tiles[len(tiles) :, 0] == -1).all()


NAMES = ("y", "x", "gate_up", "down", "weights", "residual", "gate_up's bias", "down's bias")


def check_gradients(shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
    """Values and gradients in training against the reference's in float32."""
    from cuformers.kernels.experts import triton
    from cuformers.kernels.experts.reference import experts

    torch.manual_seed(0)
    *floats, ids, residual = operands(shape, dtype, device)
    given = options(shape, dtype, device)
    floats += [residual, *given.pop("biases", ())]
    direction = randn(shape.T, shape.H, dtype=dtype, device=device)
    told = []
    for function, lift in ((triton.experts, False), (experts, True)):
        leaves = [(t.float() if lift else t).detach().clone().requires_grad_() for t in floats]
        biases = {"biases": Biases(*leaves[5:])} if shape.biases else {}
        with poisoned():
            y = function(*leaves[:4], ids, shape.activation, residual=leaves[4], scale=0.5, **given, **biases)
            y.backward(direction.float() if lift else direction)
        told.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for name, found, right in zip(NAMES, *told):
        assert found.shape == right.shape and found.dtype == (torch.float32 if name == "weights" else dtype)
        assert error(found, right) <= 2 * TOLERANCE[dtype], f"{name} of {shape}: {error(found, right):.2e}"


def check_alone(
    shape: ExpertShape, dtype: torch.dtype, device: torch.device, same: Callable[[Tensor, Tensor], bool]
) -> None:
    """A deterministic table's result for a token: in the whole batch, in parts of it, alone, and in training."""
    ops = select(Problem(device="cuda", capability=(9, 0), dtype=dtype), deterministic=True)
    torch.manual_seed(0)
    x, gate_up, down, _, _, residual = operands(shape, dtype, device)
    given = options(shape, dtype, device)
    logits = randn(shape.T, shape.E, dtype=dtype, device=device)

    def rows(begin: int, end: int) -> Tensor:
        cut = slice(begin, end)
        routes = ops.moe_route(logits[cut], shape.k, normalise=True)
        with poisoned():
            return ops.experts(
                x[cut], gate_up, down, *routes, shape.activation, residual=residual[cut], scale=0.5, **given
            )

    with torch.no_grad():
        whole = rows(0, shape.T)
        assert varied(whole)
        for begin, end in ((0, 1), (shape.T - 1, shape.T), (1, 3), (2, shape.T - 1), (shape.T // 2, shape.T)):
            assert same(rows(begin, end), whole[begin:end]), f"rows {begin} to {end} of {shape}"
    gate_up.requires_grad_()
    assert same(rows(0, shape.T).detach(), whole), f"training of {shape}"


def check_invariant_gradients(shape: ExpertShape, device: torch.device) -> None:
    """Gradients of a deterministic table through routing and experts against plain PyTorch's."""
    deterministic = select(Problem(device="cuda", capability=(9, 0)), deterministic=True)
    told = []
    for ops in (deterministic, reference()):
        torch.manual_seed(0)
        x, gate_up, down, _, _, residual = operands(shape, torch.float32, device)
        logits, given = torch.randn(shape.T, shape.E).to(device), options(shape, torch.float32, device)
        leaves = [t.requires_grad_() for t in (x, gate_up, down, residual, logits, *given.get("biases", ()))]
        routes = ops.moe_route(logits, shape.k, normalise=True)
        y = ops.experts(x, gate_up, down, *routes, shape.activation, residual=residual, scale=0.5, **given)
        told.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    assert all(error(found, right) < 1e-5 for found, right in zip(*told, strict=True))
