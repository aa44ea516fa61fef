"""What the attention backends are tried with, and the oracle: eager in float64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuformers.nn.attention.backend import AttentionBackend, AttentionProblem, AttentionSpec
from cuformers.nn.attention.choose import choose_backend
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.step import full_step

FORWARD = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Greatest ||out - oracle|| / ||oracle||; float64 inputs may be computed in float32 inside."""
BACKWARD = {dtype: 2 * tolerance for dtype, tolerance in FORWARD.items()}


@dataclass(frozen=True)
class Shape:
    """One attention over sequences of these lengths."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        name = f"{'-'.join(map(str, self.lengths))}x{self.heads}h{self.kv_heads}d{self.head_dim}"
        extras = {"w": self.window, "cap": self.softcap, "sinks": self.sinks or None}
        return name + "".join(f"-{k}{v}" for k, v in extras.items() if v is not None)

    @property
    def spec(self) -> AttentionSpec:
        """The layer."""
        return AttentionSpec(
            layer=0, num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            scale=1.7 * self.head_dim**-0.5, window=self.window, softcap=self.softcap, sinks=self.sinks,
        )  # fmt: skip

    def problem(self, dtype: torch.dtype, device: torch.device, train: bool) -> AttentionProblem:
        """What a model of such layers asks."""
        return AttentionProblem(
            device=device, dtype=dtype, head_dim=self.head_dim, softcap=self.softcap is not None,
            window=self.window is not None, sinks=self.sinks, train=train,
        )  # fmt: skip

    @property
    def asks(self) -> frozenset[str]:
        """What goes beyond plain causal attention."""
        return frozenset(self.problem(torch.float32, torch.device("cpu"), False).asks)


RAGGED, SQUARE = (1, 130, 17, 64), (33, 33)
SHAPES = (
    *(Shape((n,)) for n in (1, 2, 7, 63, 64, 65, 127, 128, 129, 130)),
    *(Shape(RAGGED, heads, kv) for heads, kv in ((4, 4), (4, 1), (6, 2))),
    *(Shape(lengths, head_dim=dim) for dim in (80, 96, 128, 192, 256) for lengths in (RAGGED, SQUARE)),
    *(Shape(lengths, window=w) for w in (1, 5, 64, 200) for lengths in (RAGGED, SQUARE)),
    *(Shape(lengths, softcap=3.0, window=w) for w in (None, 20) for lengths in (RAGGED, SQUARE)),
    *(Shape(n, sinks=True, window=w, head_dim=d) for w, d in ((None, 64), (20, 128)) for n in (RAGGED, SQUARE)),
    Shape(RAGGED, 8, 1, 64, window=9, softcap=2.0, sinks=True),
)


@dataclass(frozen=True)
class Inputs:
    """Queries, keys, values, the gradient of the output, and sinks where there are any."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    sinks: Tensor | None

    def to(self, dtype: torch.dtype, device: torch.device) -> "Inputs":
        """Copies that take gradients."""
        sinks = None if self.sinks is None else self.sinks.to(device, dtype).requires_grad_()
        q, k, v, grad = (x.to(device, dtype).requires_grad_() for x in (self.q, self.k, self.v, self.grad))
        return Inputs(q, k, v, grad, sinks)


def inputs(shape: Shape, dtype: torch.dtype) -> Inputs:
    """The same on every device: float64 numbers that `dtype` holds exactly."""
    draw = torch.Generator().manual_seed(sum(shape.lengths) + shape.head_dim)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw).to(dtype).double()

    T, d = sum(shape.lengths), shape.head_dim
    sinks = noise(shape.heads) if shape.sinks else None
    q, k, v = (noise(T, heads, d) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    return Inputs(q, k, v, noise(T, shape.heads, d), sinks)


def results(backend: AttentionBackend, shape: Shape, x: Inputs, train: bool) -> dict[str, Tensor]:
    """The output and, in training, the gradients."""
    step = full_step(torch.arange(len(x.q), device=x.q.device), shape.lengths, backend)
    with torch.set_grad_enabled(train):
        out = backend.forward(x.q, x.k, x.v, shape.spec, step, x.sinks)
    found = {"output": out.detach()}
    if train:
        wanted: dict[str, Any] = {"q": x.q, "k": x.k, "v": x.v, "sinks": x.sinks}
        wanted = {name: tensor for name, tensor in wanted.items() if tensor is not None}
        found |= dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), x.grad.detach())))
    return found


def check(name: str, shape: Shape, dtype: torch.dtype, device: torch.device, train: bool) -> None:
    """Compares a backend, chosen as a model would choose it, with the oracle."""
    backend = choose_backend(name, shape.problem(dtype, device, train))
    x = inputs(shape, dtype)
    expected = results(EagerAttention(), shape, x.to(torch.float64, torch.device("cpu")), train)
    found = results(backend, shape, x.to(dtype, device), train)
    assert set(found) == set(expected)
    for what, tensor in found.items():
        assert tensor.dtype == dtype and tensor.shape == expected[what].shape
        tolerance = (FORWARD if what == "output" else BACKWARD)[dtype]
        off = _error(tensor, expected[what], x)
        assert off <= tolerance, f"{what} of {name}, {shape}, {dtype}: {off:.1e} off"


def _error(out: Tensor, oracle: Tensor, x: Inputs) -> float:
    """Relative; where the oracle all but vanishes, as gradients of weights that can't change do, to what came in."""
    off = (out.double().cpu() - oracle).norm()
    return (off / torch.maximum(oracle.norm(), 0.01 * x.grad.norm())).item()

