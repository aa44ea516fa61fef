"""How a call of an op is described and its Triton implementation judged.

The oracle is the reference on inputs lifted to float32. Sizes are odd on purpose: no dim is a power of two by rule.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cuformers.kernels import table
from cuformers.kernels.op import Problem

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Greatest ||out - oracle|| / ||oracle||: a few roundings of the dtype; the same on the CPU and on a GPU."""


@dataclass
class Call:
    """Arguments of an op; `written` names those that it writes, to be compared as results."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    def run(self, function: Callable, *, lift: bool = False) -> list[Tensor]:
        """The results of the function on copies of the arguments, in float32 where `lift`."""
        args = [_copy(a, lift) for a in self.args]
        kwargs = {k: _copy(v, lift) for k, v in self.kwargs.items()}
        out = function(*args, **kwargs)
        return list(_tensors((out, *(kwargs[name] for name in self.written))))


@dataclass(frozen=True)
class Case:
    """A named way to make a call for a dtype and device."""

    op: str
    name: str
    make: Callable[[torch.dtype, torch.device], Call]

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def _copy(value: Any, lift: bool) -> Any:
    if isinstance(value, tuple) and type(value) is not tuple:  # a NamedTuple
        return type(value)(*(_copy(v, lift) for v in value))
    if not isinstance(value, Tensor):
        return value
    value = value.clone().pin_memory() if value.is_pinned() else value.clone()
    return value.float() if lift and value.is_floating_point() else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for v in value:
            yield from _tensors(v)


def error(out: Tensor, oracle: Tensor) -> float:
    """Relative error; NaN where only one of both is not a number, as that passes no comparison."""
    out, oracle = out.double().cpu(), oracle.double().cpu()
    poison = oracle.isnan()
    if not torch.equal(out.isnan(), poison):
        return float("nan")
    out, oracle = (torch.where(poison, 0.0, x) for x in (out, oracle))
    return ((out - oracle).norm() / oracle.norm().clamp(min=1e-9)).item()


def check(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Runs the Triton implementation on poisoned memory and compares all results with the oracle."""
    torch.manual_seed(0)
    call = case.make(dtype, device)
    implementations = next(op for op in table.OPS if op.name == case.op).implementations
    triton, reference = (next(i for i in implementations if i.name == name) for name in ("triton", "reference"))
    with poisoned():
        outs = call.run(triton.load())
    oracles = call.run(reference.load(), lift=True)
    assert len(outs) == len(oracles)
    for i, (out, oracle) in enumerate(zip(outs, oracles)):
        assert out.shape == oracle.shape
        if not out.is_floating_point():
            assert torch.equal(out, oracle), f"result {i} of {case}: {out.tolist()} for {oracle.tolist()}"
            continue
        assert error(out, oracle) <= TOLERANCE[dtype], f"result {i} of {case}: {error(out, oracle):.2e}"


def varied(out: Tensor) -> bool:
    """Whether these are finite numbers of many values, so that finding them equal says something."""
    return bool(out.isfinite().all()) and out.unique().numel() >= min(200, out.numel() // 100)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN (integers: the largest), so that what a kernel leaves unwritten is seen."""
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


def triton_kernels(dtype: torch.dtype) -> table.Kernels:
    """The table that a GPU of capability 9.0 gets."""
    return table.select(Problem(device="cuda", capability=(9, 0), dtype=dtype), "triton")


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Noise, the same on every device."""
    return torch.randn(*shape).to(device, dtype)
