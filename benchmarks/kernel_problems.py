"""What `benchmarks.kernels` measures: the ops of one decode step, in the shapes of named models."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from cuformers.kernels.attention_plan.reference import attention_plan
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.penalize import Penalties, workspace

PAGE = 64


class Arguments(NamedTuple):
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An op in one shape."""

    op: str
    shape: dict[str, Any]
    """What distinguishes the row."""
    bytes: int
    """Least bytes to move: weights, keys and values, activations in and out."""
    build: Callable[[], Arguments]
    """Makes fresh arguments, so that runs can rotate among sets that no cache holds."""
    peer: bool = False
    """Whether plain PyTorch in the same dtype is timed beside it."""


@dataclass(frozen=True)
class Dims:
    """A model's sizes; `shrink` divides them for a dry run on the CPU."""

    name: str
    device: torch.device
    shrink: int = 1

    def __getattr__(self, key: str) -> int:
        value = SHAPES[self.name][key]
        if self.shrink > 1 and key.startswith("num_"):
            return value // 8
        return max(1, value // self.shrink) if key.endswith("_size") else value

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """bf16 noise."""
        return (torch.randn(*shape, device=self.device) * scale).to(torch.bfloat16)


def linear_shapes(dims: Dims) -> dict[str, tuple[int, int, bool]]:
    """Weight name -> (outputs, inputs, whether a norm comes before; else a residual after)."""
    q = dims.num_attention_heads * dims.head_dim
    kv = dims.num_key_value_heads * dims.head_dim
    return {
        "qkv": (q + 2 * kv, dims.hidden_size, True),
        "o": (dims.hidden_size, q, False),
        "gate_up": (2 * dims.intermediate_size, dims.hidden_size, True),
        "down": (dims.hidden_size, dims.intermediate_size, False),
        "head": (dims.vocab_size, dims.hidden_size, True),
    }


def linear_problem(dims: Dims, name: str, T: int) -> Problem:
    """One product of a decode step."""
    outputs, K, normed = linear_shapes(dims)[name]
    gated = name == "gate_up"
    N = outputs // 2 if gated else outputs

    def build() -> Arguments:
        x, weight = dims.randn(T, K), dims.randn(outputs, K, scale=K**-0.5)
        norm = Norm(dims.randn(K), 1e-6) if normed else None
        if gated:
            return Arguments((x, weight, None, "silu"), {"norm": norm})
        return Arguments((x, weight), {"norm": norm, "residual": None if normed else dims.randn(T, N)})

    moved = 2 * (outputs * K + T * (K + N) + (0 if normed else T * N))
    shape = {"model": dims.name, "weight": name, "rows": T, "N": N, "K": K}
    return Problem(op="gated_linear" if gated else "linear", shape=shape, bytes=moved, build=build, peer=True)


def attention_problem(dims: Dims, N: int, length: int) -> Problem:
    """Attention of N sequences with `length` keys; the plan, shared by a step's layers, is not measured."""
    heads, kv, D = dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim
    blocks = -(-length // PAGE)

    def build() -> Arguments:
        pool = dims.randn(2, N * blocks + 1, kv, PAGE, D)
        tables = torch.randperm(N * blocks, device=dims.device).view(N, blocks).int()
        lengths = torch.full((N,), length, dtype=torch.int32, device=dims.device)
        plan = attention_plan(lengths, num_kv_heads=kv)
        return Arguments((dims.randn(N, heads, D), *pool, tables, lengths), {"scale": D**-0.5, "plan": plan})

    moved = 2 * (2 * N * length * kv * D + 2 * N * heads * D)
    shape = {"model": dims.name, "rows": N, "length": length}
    return Problem(op="paged_attention", shape=shape, bytes=moved, build=build)


def decode_problem(dims: Dims, N: int, length: int) -> Problem:
    """Attention from the projected rows on; the newest of `length` keys is written and attended to."""
    heads, kv, D = dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim
    plain = attention_problem(dims, N, length)

    def build() -> Arguments:
        (_, k, v, tables, lengths), kwargs = plain.build()
        angle = torch.rand(length, D // 2, device=dims.device) * 6
        last = lengths - 1
        slots = tables[:, (length - 1) // PAGE] * PAGE + (length - 1) % PAGE
        norm = Norm(dims.randn(D), 1e-6)
        return Arguments(
            (dims.randn(N, (heads + 2 * kv) * D), angle.cos(), angle.sin(), last, k, v, slots, tables, lengths),
            kwargs | {"num_heads": heads, "q_norm": norm, "k_norm": norm},
        )

    moved = plain.bytes + 2 * 2 * N * kv * D
    return Problem(op="decode_attention", shape=plain.shape, bytes=moved, build=build)


def rope_problem(dims: Dims, T: int) -> Problem:
    """Head norms, rotation and cache write of T tokens."""
    heads, kv, D = dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim

    def build() -> Arguments:
        angle = torch.rand(4096, D // 2, device=dims.device) * 6
        pool = torch.zeros(2, T, kv, PAGE, D, device=dims.device, dtype=torch.bfloat16)
        slots = (torch.arange(T, device=dims.device) * PAGE + 5).int()
        norm = Norm(dims.randn(D), 1e-6)
        return Arguments(
            (dims.randn(T, (heads + 2 * kv) * D), angle.cos(), angle.sin(), slots % 4096),
            {"num_heads": heads, "num_kv_heads": kv, "head_dim": D, "q_norm": norm, "k_norm": norm}
            | {"k_cache": pool[0], "v_cache": pool[1], "slots": slots},
        )

    moved = 2 * T * D * (2 * (heads + kv) + 3 * kv)
    return Problem(op="rope_cache", shape={"model": dims.name, "rows": T}, bytes=moved, build=build)


def norm_problem(dims: Dims, T: int) -> Problem:
    """A norm on its own."""
    H = dims.hidden_size

    def build() -> Arguments:
        return Arguments((dims.randn(T, H), dims.randn(H), 1e-6), {})

    shape = {"model": dims.name, "rows": T}
    return Problem(op="rms_norm", shape=shape, bytes=2 * (2 * T * H + H), build=build, peer=True)


SETTINGS: dict[str, tuple[float, int, float, float]] = {
    "temperature": (1.0, 0, 1.0, 0.0),
    "top_k 20, top_p 0.95": (0.6, 20, 0.95, 0.0),
    "top_p 0.9": (1.0, 0, 0.9, 0.0),
    "min_p 0.1": (1.0, 0, 1.0, 0.1),
}


def sample_problem(dims: Dims, B: int, setting: str) -> Problem:
    """One token for each of B rows; "greedy" is the op argmax."""
    V = dims.vocab_size

    def build() -> Arguments:
        logits = dims.randn(B, V, scale=3.0)
        if setting == "greedy":
            return Arguments((logits,), {})
        temperature, top_k, top_p, min_p = (torch.full((B,), x, device=dims.device) for x in SETTINGS[setting])
        index = torch.arange(B, device=dims.device)
        return Arguments((logits, temperature.float(), top_k.int(), top_p.float(), min_p.float(), index, index * 3), {})

    op = "argmax" if setting == "greedy" else "sample"
    return Problem(op=op, shape={"rows": B, "vocab": V, "setting": setting}, bytes=2 * B * V, build=build)


def penalty_problem(dims: Dims, R: int) -> Problem:
    """All three penalties of R rows that have a prompt of 500 tokens and an answer of 500."""
    V, prompt, length = dims.vocab_size, 500, 1000

    def build() -> Arguments:
        def full(value: float, *more: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((R, *more), value, dtype=dtype, device=dims.device)

        penalties = Penalties(
            prompt_lengths=full(prompt, dtype=torch.int32),
            repetition=full(1.1),
            frequency=full(0.2),
            presence=full(0.1),
            min_new_tokens=full(0, dtype=torch.int32),
            eos=full(-1, 8, dtype=torch.int64),
            bias_ids=full(-1, 16, dtype=torch.int64),
            bias=full(0.0, 16),
        )
        rows = torch.arange(R, dtype=torch.int32, device=dims.device)
        history = torch.randint(0, V, (R, length), dtype=torch.int32, device=dims.device)
        lengths = full(length, dtype=torch.int32)
        logits = dims.randn(R, V, scale=3.0)
        return Arguments((logits, rows, lengths, history, penalties), {"counts": workspace(R, V, dims.device)})

    return Problem(op="penalize", shape={"rows": R, "vocab": V, "history": length}, bytes=6 * R * V, build=build)


def problems(dims: Dims, only: str | None) -> Iterator[Problem]:
    """Every row for one model; `only` keeps the ops whose name contains it."""
    everything = [
        *(linear_problem(dims, name, T) for name in linear_shapes(dims) for T in (1, 2, 4, 8, 16, 32)),
        *(
            problem(dims, N, length)
            for problem in (decode_problem, attention_problem)
            for N in (1, 32)
            for length in (128, 256, 1024, 8192)
        ),
        *(rope_problem(dims, T) for T in (1, 8, 32)),
        *(norm_problem(dims, T) for T in (1, 32)),
    ]
    if dims.name == "qwen3-0.6b":
        everything += [sample_problem(dims, B, s) for B in (1, 32, 256) for s in ("greedy", *SETTINGS)]
        everything += [penalty_problem(dims, R) for R in (1, 32, 256)]
    yield from (p for p in everything if only is None or only in p.op)
