"""The walk over chunks of tokens: logits by cuBLAS, losses and the logits' gradient by a kernel, products with it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from cuformers.kernels.linear_cross_entropy.kernel import loss_kernel

CHUNK_BYTES = 1 << 30
"""Memory for the logits of a chunk: 4096 tokens of a vocabulary of 131072 in bfloat16."""
ALIGN = 16
"""Numbers that the distance between two rows of logits is a multiple of, so that tensor cores take any vocabulary."""
TILE = 128
"""Tokens that a chunk is a multiple of where it can be: a tile of cuBLAS."""
BLOCK, WARPS = 8192, 16
"""Logits that a program holds at a time, and its warps."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """How products become logits, and which labels count for nothing."""

    scale: float
    softcap: float | None
    ignore_index: int


class Wanted(NamedTuple):
    """Gradients to form, in float32: they are rounded once, when they are scaled."""

    x: bool
    weight: bool


class Gradients(NamedTuple):
    """None where it was not wanted."""

    x: Tensor | None
    """[T, H], float32."""
    weight: Tensor | None
    """[V, H], float32."""


def losses(x: Tensor, weight: Tensor, labels: Tensor, head: Head, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """(nll, entropy or None), each [T]."""
    nll, uncertainty = _empty(x), _empty(x) if entropy else None
    for cut, logits in _chunks(x, weight):
        torch.mm(x[cut], weight.t(), out=logits)
        _launch(logits, labels[cut], head, nll[cut], _cut(uncertainty, cut))
    return nll, uncertainty


def losses_and_gradients(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    head: Head,
    entropy: bool,
    by_nll: Tensor,
    by_entropy: Tensor | None,
    wanted: Wanted,
) -> tuple[Tensor, Tensor | None, Gradients]:
    """The same, and the gradients that come of by_nll and by_entropy, float32 [T]; the latter's None is zeros."""
    nll, uncertainty = _empty(x), _empty(x) if entropy else None
    by_entropy = torch.zeros_like(nll) if entropy and by_entropy is None else by_entropy
    by_x = torch.zeros(x.shape, dtype=torch.float32, device=x.device) if wanted.x else None
    by_weight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device) if wanted.weight else None
    for cut, logits in _chunks(x, weight):
        torch.mm(x[cut], weight.t(), out=logits)
        _launch(logits, labels[cut], head, nll[cut], _cut(uncertainty, cut), by_nll[cut], _cut(by_entropy, cut))
        if by_x is not None:
            _add_product(by_x[cut], logits, weight)
        if by_weight is not None:
            _add_product(by_weight, logits.t(), x[cut])
    return nll, uncertainty, Gradients(by_x, by_weight)


def chunk_rows(num_rows: int, row_bytes: int) -> int:
    """Tokens of a chunk: equal chunks, as few as fit the memory, whole tiles where that can be."""
    most = max(1, CHUNK_BYTES // row_bytes)
    chunks = -(-num_rows // most)
    equal = -(-num_rows // chunks)
    return min(most, _whole(equal, TILE))


def _chunks(x: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(slice of the tokens, memory for their logits [rows, V]) of each chunk in turn; the memory is the same."""
    T, V = len(x), len(weight)
    if not T:
        return
    width = _whole(V, ALIGN)
    rows = chunk_rows(T, width * x.element_size())
    memory = torch.empty(min(rows, T), width, dtype=x.dtype, device=x.device)
    for start in range(0, T, rows):
        stop = min(T, start + rows)
        yield slice(start, stop), memory[: stop - start, :V]


def _launch(
    logits: Tensor,
    labels: Tensor,
    head: Head,
    nll: Tensor,
    entropy: Tensor | None,
    by_nll: Tensor | None = None,
    by_entropy: Tensor | None = None,
) -> None:
    rows, V = logits.shape
    cut: dict[str, Any] = {
        "BLOCK": min(BLOCK, triton.next_power_of_2(V)),
        "SOFTCAP": head.softcap is not None,
        "ENTROPY": entropy is not None,
        "GRAD": by_nll is not None,
        "num_warps": WARPS,
    }
    loss_kernel[(rows,)](
        logits, labels, nll, entropy, by_nll, by_entropy, V, logits.stride(0),
        head.ignore_index, float(head.scale), float(head.softcap or 0.0), **cut,
    )  # fmt: skip


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total is float32 and nothing is rounded to the dtype of a and b."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:  # Triton's interpreter
        total.addmm_(a.float(), b.float())


def _whole(count: int, unit: int) -> int:
    """The least multiple of the unit that holds so many."""
    return -(-count // unit) * unit


def _cut(x: Tensor | None, cut: slice) -> Tensor | None:
    return None if x is None else x[cut]


def _empty(x: Tensor) -> Tensor:
    return torch.empty(len(x), dtype=torch.float32, device=x.device)
