"""Before a model gets somebody's kernel, it is compared with the specification, on inputs of the model's own shapes.

The measure is the error beside |expected| + rms(expected), element by element and row by row, with the expected values
computed in float64 and the kernel given what Transformers would give it. The limits leave room for an implementation
that rounds to its dtype after every operation, as Transformers' own modules do, and for nothing else.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuformers.kernels.hub.layers import Layer, Uses
from cuformers.kernels.op import Mode

LIMIT = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Greatest error of a value: some four roundings of the dtype; float32 leaves room for approximate instructions."""
ROWS = (1, 5, 33)
MANY = 1 << 22
"""Elements of one more input on a GPU, where kernels may take another way for many rows."""
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, NotImplementedError, IndexError)
"""What calling a kernel that does not fit raises; a CUDA error is a RuntimeError."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One call: its tensors, and the plain numbers behind them."""

    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...] = ()
    num_trained: int | None = None
    """How many of the tensors, from the first, may ask for gradients; None for all."""
    overwrites: bool = False
    """Whether the kernel may write into its inputs."""

    def ask_gradients(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those of the tensors that training wants gradients of, marked so."""
        return tuple(t.requires_grad_() for t in tensors[: self.num_trained])


class BackwardMissing(ValueError):
    """The kernel's result does not lead back to its inputs."""


def check(
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    layer: Layer,
    uses: Uses,
    *,
    device: torch.device,
    dtype: torch.dtype,
    mode: Mode,
) -> float:
    """The greatest error found, as a fraction of what is allowed.

    Raises:
        BackwardMissing: mode is "train", and no gradient comes back.
        ValueError: a wrong shape, dtype or number, an input that was written, or the kernel's own failure.
    """
    with torch.inference_mode(False), torch.set_grad_enabled(mode == "train"):
        return max(_check_sample(kernel, plain, sample, dtype, mode) for sample in samples(layer, uses, device, dtype))


def _check_sample(
    kernel: Callable[..., Any], plain: Callable[..., Any], sample: Sample, dtype: torch.dtype, mode: Mode
) -> float:
    given = tuple(t.clone() for t in sample.tensors)
    exact = tuple(t.double() for t in sample.tensors)
    trained = (sample.ask_gradients(given), sample.ask_gradients(exact)) if mode == "train" else None
    try:
        out = _tuple(kernel(*given, *sample.numbers))
    except FAILURES as problem:
        raise ValueError(f"fails on {_shapes(given)}: {type(problem).__name__}: {problem}") from problem
    wanted = _tuple(plain(*exact, *sample.numbers))
    if len(out) != len(wanted):
        raise ValueError(f"gives {len(out)} results on {_shapes(given)}; right is {len(wanted)}")
    worst = max(_error(o, w, dtype, "result", given) for o, w in zip(out, wanted))
    if not sample.overwrites and not all(torch.equal(g, t) for g, t in zip(given, sample.tensors)):
        raise ValueError(f"writes into its input {_shapes(given)}")
    return worst if trained is None else max(worst, _check_backward(out, wanted, *trained, dtype))


def _check_backward(
    out: tuple[Tensor, ...],
    wanted: tuple[Tensor, ...],
    given: tuple[Tensor, ...],
    exact: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> float:
    if not all(o.requires_grad for o in out):
        raise BackwardMissing("gives no gradient")
    grads = tuple(_random(tuple(o.shape), o.device, dtype, seed=7 + i) for i, o in enumerate(out))
    want = torch.autograd.grad(wanted, exact, tuple(g.double() for g in grads))
    try:
        got = torch.autograd.grad(out, given, grads, allow_unused=True)
    except FAILURES as problem:
        raise ValueError(f"fails in its backward pass on {_shapes(given)}: {problem}") from problem
    if any(g is None for g in got):
        raise BackwardMissing("gives no gradient")
    return max(_error(g, w, dtype, "gradient", given) for g, w in zip(got, want) if g is not None)


def _error(out: Tensor, wanted: Tensor, dtype: torch.dtype, what: str, given: tuple[Tensor, ...]) -> float:
    """The greatest error as a fraction of the limit."""
    if out.shape != wanted.shape or out.dtype != dtype:
        raise ValueError(
            f"gives a {what} of shape {tuple(out.shape)} in {out.dtype} on {_shapes(given)}; right is "
            f"{tuple(wanted.shape)} in {dtype}"
        )
    wanted = wanted.detach()
    scale = wanted.abs() + wanted.square().mean(-1, keepdim=True).sqrt()
    error = (out.detach().double() - wanted).abs() / (scale * LIMIT[dtype]).clamp(min=1e-30)
    worst = float(error.nan_to_num(nan=float("inf")).max())
    if worst > 1.0:
        at = int(error.nan_to_num(nan=float("inf")).argmax())
        numbers = f"{float(out.flatten()[at]):.6g} where {float(wanted.flatten()[at]):.6g} is right"
        raise ValueError(f"gives a wrong {what} on {_shapes(given)}: {numbers}, {worst:.3g} times the error allowed")
    return worst


def samples(layer: Layer, uses: Uses, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls of the shapes that the model has, for several numbers of rows."""

    def random(*shape: int) -> Tensor:
        return _random(shape, device, dtype, seed=sum(shape))

    def counts(width: int) -> tuple[int, ...]:
        return (*ROWS, max(34, MANY // width)) if device.type == "cuda" else ROWS

    if layer.kind == "norm":
        for width, eps in uses.norms:
            for rows in counts(width):
                weight = random(width) + 1
                for x in (random(rows, width), random(rows, 3, width)):  # hidden states, heads
                    x[-1] *= eps**0.5 if rows > 1 else 1.0  # so small that epsilon counts
                    yield Sample(tensors=(x, weight), numbers=(eps,))
    elif layer.kind == "rotary":
        for heads, kv_heads, head_dim, rot in uses.rotations:
            for rows in counts(heads * head_dim):
                angles = torch.rand(rows, rot // 2, generator=torch.Generator().manual_seed(rows)) * 6.283
                factors = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
                q, k = random(rows, heads, head_dim), random(rows, kv_heads, head_dim)
                yield Sample(tensors=(q, k, *factors), num_trained=2, overwrites=True)
    else:
        for width in (width for activation, width in uses.activations if activation == layer.activation):
            for rows in counts(2 * width):
                yield Sample(tensors=(random(rows, 2 * width),))


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, *, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _shapes(tensors: tuple[Tensor, ...]) -> str:
    return " and ".join(str(list(t.shape)) for t in tensors[:2]) + f" {tensors[0].dtype}".replace("torch.", "")
