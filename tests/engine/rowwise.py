"""Ops in plain PyTorch that compute each token by itself, so that on a CPU too its bits do not tell what else ran.

A product of many rows may add in another order than that of one; where keys are rounded to fp8, the last bit of a
float32 can become a whole step of theirs.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cuformers.kernels.table import Kernels, reference

PER_TOKEN = ("qkv", "rows", "slots", "block_tables", "lengths", "residual")
"""Arguments by name that have a row for each token, beside the first one."""


def each_row(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """The function, one row after the other; `names` are those of its positional arguments, the first one's rows."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        per_row = [name for name in (names[0], *PER_TOKEN) if isinstance(given.get(name), Tensor)]
        count = given[names[0]].shape[0]
        parts = [function(**(given | {name: given[name][i : i + 1] for name in per_row})) for i in range(count)]
        if not parts:
            return function(*args, **kwargs)
        return torch.cat(parts) if isinstance(parts[0], Tensor) else tuple(torch.cat(x) for x in zip(*parts))

    return call


def chunk_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, bounds: Tensor, rows: Tensor, lengths: Tensor,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Each query as a row that decodes."""
    out = torch.zeros_like(q)
    for (begin, end), row, length in zip(pairwise(bounds.tolist()), rows.tolist(), lengths.tolist()):
        for i in range(begin, end):
            own = torch.tensor([length - end + i + 1], dtype=torch.int32)
            out[i] = reference().paged_attention(q[i : i + 1], k_cache, v_cache, tables[row][None], own, **options)[0]
    return out


def row_by_row() -> Kernels:
    """The references, a row at a time."""
    ops = reference()
    decode = ("qkv", "cos", "sin", "rows", "k_cache", "v_cache", "slots", "block_tables", "lengths")
    return replace(
        ops,
        rms_norm=each_row(ops.rms_norm, "x", "weight", "eps", "offset"),
        linear=each_row(ops.linear, "x", "weight", "bias"),
        gated_linear=each_row(ops.gated_linear, "x", "weight", "bias", "activation"),
        gated_activation=each_row(ops.gated_activation, "gate_up", "activation"),
        rope_cache=each_row(ops.rope_cache, "qkv", "cos", "sin", "rows"),
        paged_attention=each_row(ops.paged_attention, "q", "k_cache", "v_cache", "block_tables", "lengths"),
        decode_attention=each_row(ops.decode_attention, *decode),
        chunk_attention=chunk_attention,
    )
