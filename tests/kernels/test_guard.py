"""Implementations that know no gradient give way to the reference when one is asked for, and only then."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cuformers.kernels import guard
from cuformers.kernels.guard import guarded
from cuformers.kernels.norm.reference import rms_norm
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.op import Implementation, Op, Problem

CPU = Problem(device="cpu")


def deaf(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Right, and without a gradient; its results are told by their sign."""
    return -rms_norm(x.detach(), weight.detach(), eps)


def op(modes: frozenset = frozenset({"infer"})) -> Op:
    fake = Implementation(name="fake", load=lambda: deaf, modes=modes)
    return Op("rms_norm", (fake, Implementation(name="reference", load=lambda: rms_norm)))


@pytest.mark.parametrize("which", ["x", "weight"])
def test_gradients_are_those_of_the_reference(which: str) -> None:
    torch.manual_seed(0)
    arguments = {"x": torch.randn(2, 6), "weight": torch.randn(6)}
    wanted = arguments[which].requires_grad_()
    function = op().choose(CPU).function
    for call in (lambda: function(*arguments.values(), 1e-3), lambda: function(**arguments, eps=1e-3)):
        (got,) = torch.autograd.grad(call().square().sum(), wanted)
        (want,) = torch.autograd.grad(rms_norm(*arguments.values(), 1e-3).square().sum(), wanted)
        assert want.abs().max() > 0.1
        torch.testing.assert_close(got, want)


def test_without_a_wish_for_gradients_the_implementation_runs() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6), torch.randn(6)
    function = op().choose(CPU).function
    want = deaf(x, weight, 1e-3)
    assert torch.equal(function(x, weight, 1e-3), want)
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            assert torch.equal(function(x, weight.clone().requires_grad_(), 1e-3), want)


def test_a_norm_among_the_arguments_counts() -> None:
    function = guarded(lambda x, norm: "fast", lambda x, norm: "reference")
    x, weight = torch.ones(1, 2), torch.ones(2)
    assert function(x, norm=Norm(weight, 1e-6)) == "fast"
    assert function(x, norm=Norm(weight.requires_grad_(), 1e-6)) == "reference"
    assert function(x, Norm(weight, 1e-6)) == "reference"
    assert function(x, None) == "fast"


def test_what_trains_is_taken_as_it_is() -> None:
    assert op(frozenset({"infer", "train"})).choose(CPU).function is deaf
    assert op().choose(Problem(device="cpu", mode="train")).function is rms_norm


def test_costs_less_than_a_microsecond_without_grad_mode() -> None:
    plain = lambda x, norm: x  # noqa: E731
    x = torch.ones(1)
    with torch.no_grad():
        bare, ours = (min(_seconds_of_1000(f, x) for _ in range(20)) for f in (plain, guarded(plain, plain)))
    assert ours - bare < 1e-3


def _seconds_of_1000(function, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    for _ in range(1000):
        function(x, norm=None)
    return time.perf_counter() - begin


def test_among_several_gpus_a_kernel_runs_on_its_tensors_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.append(torch.device("meta"))

    def kernel(norm: Norm, *, x: torch.Tensor) -> list[torch.device]:
        return [*entered, x.device, norm.weight.device]

    monkeypatch.setattr(guard, "on", on)
    monkeypatch.setattr(guard, "device_count", lambda: 2)
    gpu = Problem(device="cuda", capability=(9, 0))
    made = Op("kernel", (Implementation(name="fake", load=lambda: kernel, min_capability=(8, 0)),))
    x = torch.ones(2, 6)
    assert made.choose(gpu).function(Norm(x[0], 1e-6), x=x) == [x.device] * 3 and len(entered) == 2
    monkeypatch.setattr(guard, "device_count", lambda: 1)
    assert made.choose(gpu).function is kernel, "one GPU costs nothing"
