"""Op `chunk_attention` as a backend: a step's keys are laid in pages for it. It has no backward pass of its own."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.cuda.device import capability
from cuformers.kernels.op import FLOATS
from cuformers.kernels.recompute import recomputed
from cuformers.nn.attention.backend import AttentionBackend, AttentionProblem, AttentionSpec, lacks
from cuformers.nn.attention.flex import FlexAttention
from cuformers.nn.step import Step

PAGE = 64
"""Tokens of a page, as in the engine's cache."""


class Pages(NamedTuple):
    """Where the keys of sequences that follow one another in a stream lie in a pool of pages."""

    count: int
    """Pages of the pool."""
    slots: Tensor
    """[T], int64: place of each token's key among the pool's count * PAGE."""
    tables: Tensor
    """[N, M], int32: pages of each sequence; past its end they are those of others."""
    rows: Tensor
    """[N], int32: 0, 1, ..."""


@lru_cache(maxsize=2)
def pages(lengths: tuple[int, ...], device: torch.device) -> Pages:
    """Pages for sequences of these lengths; all layers of a step share them."""
    tokens = torch.tensor(lengths)
    blocks = -(-tokens // PAGE)
    first = blocks.cumsum(0) - blocks
    gaps = first * PAGE - (tokens.cumsum(0) - tokens)
    slots = torch.arange(sum(lengths)) + gaps.repeat_interleave(tokens)
    tables = first[:, None] + torch.arange(max(1, int(blocks.max())))
    rows = torch.arange(len(lengths), dtype=torch.int32)
    count = int(blocks.sum())
    return Pages(count, slots.to(device), tables.clamp(max=count - 1).int().to(device), rows.to(device))


def lay_in_pages(x: Tensor, where: Pages) -> Tensor:
    """Keys or values [T, Hkv, D] as a pool [P, Hkv, PAGE, D]; what belongs to no token is anything."""
    pool = x.new_empty(where.count * PAGE, *x.shape[1:]).index_copy_(0, where.slots, x)
    return pool.unflatten(0, (where.count, PAGE)).transpose(1, 2).contiguous()


class AttentionOverPages:
    """The op's values; where a gradient is asked for, it is the one of another backend, computed anew."""

    name: str

    def __init__(self, chunk_attention: Callable[..., Tensor], backward: AttentionBackend) -> None:
        self._attend, self._backward = chunk_attention, backward

    def why_not(self, problem: AttentionProblem) -> str | None:
        if not 16 <= problem.head_dim <= 256:
            return f"takes a head_dim from 16 to 256, not {problem.head_dim}"
        return lacks(problem, "window", "softcap", "sinks")

    def can_capture(self, problem: AttentionProblem) -> bool:
        return False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        if not q.numel():
            return q

        def values(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            return self._values(q, k, v, spec, step, sinks)

        def formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            return self._backward.forward(q, k, v, spec, step, sinks)

        return recomputed(values, formula, q, k, v, *(() if sinks is None else (sinks,)))

    def _values(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None
    ) -> Tensor:
        assert step.query_lengths is not None, "attention over pages needs the lengths on the host"
        where = pages(step.query_lengths, q.device)
        keys, values = (lay_in_pages(x, where) for x in (k, v))
        chunks = (step.cu_seqlens, where.rows, step.lengths)
        options = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap, "sinks": sinks}
        return self._attend(q, keys, values, where.tables, *chunks, **options)


class TritonAttention(AttentionOverPages):
    """attn_implementation="triton": this library's kernel, for inference. In generation it reads the cache itself."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__(_kernel, FlexAttention())

    def why_not(self, problem: AttentionProblem) -> str | None:
        if (capability(problem.device) or (0, 0)) < (8, 0):
            return "needs an NVIDIA GPU of compute capability 8.0 or newer"
        if problem.train:
            return "has no backward pass: it is for inference"
        if problem.dtype not in FLOATS:
            return f"takes bfloat16, float16 and float32, not {problem.dtype}"
        return super().why_not(problem)


def _kernel(*args: Tensor, **options: object) -> Tensor:
    from cuformers.kernels.chunk_attention.triton import chunk_attention

    return chunk_attention(*args, **options)
