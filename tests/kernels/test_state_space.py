"""The ops of state-space models: the specifications against the formulas written out, and their gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cuformers.kernels.causal_conv1d.reference import causal_conv1d
from cuformers.kernels.selective_scan.reference import selective_scan
from cuformers.kernels.ssd_scan.reference import ssd_scan

LENGTHS = (4, 0, 1, 3)
BOUNDS = torch.tensor([0, 4, 4, 5, 8], dtype=torch.int32)
T, C, S, H, G, P = 8, 3, 2, 4, 2, 3


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def conv_inputs() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return (noise(T, C), noise(C, 3), noise(C), BOUNDS), {"initial": noise(4, 2, C)}


def scan_inputs() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    args = noise(T, C), noise(T, C), -torch.rand(C, S).double(), noise(T, S), noise(T, S), BOUNDS
    return args, {"D": noise(C), "z": noise(T, C), "dt_bias": noise(C), "initial": noise(4, C, S)}


def ssd_inputs() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    args = noise(T, H, P), noise(T, H), -torch.rand(H).double(), noise(T, G, S), noise(T, G, S), BOUNDS
    return args, {"D": noise(H), "z": noise(T, H, P), "dt_bias": noise(H), "initial": noise(4, H, P, S)}


OPS = [(causal_conv1d, conv_inputs), (selective_scan, scan_inputs), (ssd_scan, ssd_inputs)]


@pytest.mark.parametrize("activation", ["silu", "none"])
def test_convolution_is_the_formula(activation: str) -> None:
    (x, weight, bias, bounds), options = conv_inputs()
    found = causal_conv1d(x, weight, bias, bounds, activation=activation, keep=True, **options)
    assert found.final is not None
    for n, length in enumerate(LENGTHS):
        own = torch.cat((options["initial"][n], x[bounds[n] : bounds[n + 1]]))
        torch.testing.assert_close(found.final[n], own[-2:])
        for t in range(length):
            out = bias + sum(weight[:, k] * own[t + k] for k in range(3))
            expected = out * torch.sigmoid(out) if activation == "silu" else out
            torch.testing.assert_close(found.y[int(bounds[n]) + t], expected)


def test_selective_scan_is_the_formula() -> None:
    (x, dt, A, B, c, bounds), o = scan_inputs()
    found = selective_scan(x, dt, A, B, c, bounds, keep=True, **o)
    assert found.final is not None
    for n in range(len(LENGTHS)):
        for i in range(C):
            h = o["initial"][n, i].clone()
            for t in range(int(bounds[n]), int(bounds[n + 1])):
                s = math.log1p(math.exp(dt[t, i] + o["dt_bias"][i]))
                h = torch.exp(s * A[i]) * h + s * x[t, i] * B[t]
                gate = o["z"][t, i] / (1 + math.exp(-o["z"][t, i]))
                torch.testing.assert_close(found.y[t, i], (h @ c[t] + o["D"][i] * x[t, i]) * gate)
            torch.testing.assert_close(found.final[n, i], h)


def test_ssd_scan_is_the_formula() -> None:
    (x, dt, A, B, c, bounds), o = ssd_inputs()
    found = ssd_scan(x, dt, A, B, c, bounds, dt_limit=(0.4, 1.1), keep=True, **o)
    assert found.final is not None
    for n in range(len(LENGTHS)):
        for i in range(H):
            h, group = o["initial"][n, i].clone(), i // (H // G)
            for t in range(int(bounds[n]), int(bounds[n + 1])):
                s = min(max(math.log1p(math.exp(dt[t, i] + o["dt_bias"][i])), 0.4), 1.1)
                h = math.exp(s * A[i]) * h + s * torch.outer(x[t, i], B[t, group])
                gate = o["z"][t, i] * torch.sigmoid(o["z"][t, i])
                torch.testing.assert_close(found.y[t, i], (h @ c[t, group] + o["D"][i] * x[t, i]) * gate)
            torch.testing.assert_close(found.final[n, i], h)


@pytest.mark.parametrize("op, inputs", OPS)
def test_a_stream_in_two_parts_is_the_stream(op: Callable, inputs: Callable[[], Any]) -> None:
    """What is kept of the first part stands before the second, be it shorter than what is kept."""
    args, options = inputs()
    whole, one = torch.tensor([0, T], dtype=torch.int32), {**options, "initial": options["initial"][:1]}
    expected = op(*args[:-1], whole, keep=True, **one)
    for cut in (0, 1, 5, T):
        parts, state = [], one["initial"]
        for part in (slice(0, cut), slice(cut, T)):
            given = [a[part] if a.shape[0] == T else a for a in args[:-1]]
            over = {k: v[part] if v.shape[0] == T else v for k, v in one.items()} | {"initial": state}
            out = op(*given, torch.tensor([0, part.stop - part.start], dtype=torch.int32), keep=True, **over)
            parts.append(out.y)
            state = out.final
        torch.testing.assert_close(torch.cat(parts), expected.y)
        torch.testing.assert_close(state, expected.final)


@pytest.mark.parametrize("op, inputs", OPS)
def test_gradients(op: Callable, inputs: Callable[[], Any]) -> None:
    args, options = inputs()
    tensors = [*args[:-1], *options.values()]

    def run(*given: Tensor) -> Tensor:
        first, rest = given[: len(args) - 1], given[len(args) - 1 :]
        return op(*first, args[-1], **dict(zip(options, rest))).y

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in tensors])


@pytest.mark.parametrize("op, inputs", OPS)
def test_no_sequence_at_all(op: Callable, inputs: Callable[[], Any]) -> None:
    args, _ = inputs()
    out = op(*(a[:0] if a.shape[0] == T else a for a in args[:-1]), torch.zeros(1, dtype=torch.int32))
    assert out.y.shape == args[0][:0].shape and out.final is None


def test_a_large_step_is_its_own_softplus() -> None:
    x = torch.ones(1, 1)
    found = selective_scan(x, x * 90, -x, x, x, torch.tensor([0, 1], dtype=torch.int32))
    torch.testing.assert_close(found.y, F.softplus(x * 90))
