"""A whole decode step as a chain of kernels, without an engine: what the ops allow, and what launching them costs."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernel_problems import PAGE, Arguments, Dims, attention_problem, linear_problem
from benchmarks.shapes import BANDWIDTH, SHAPES, weight_bytes
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.table import Kernels

LENGTH = 256


def step(
    tokens: Tensor, layers: list[dict[str, Any]], head: Arguments, tables: dict[str, Tensor], dims: Dims,
    kernels: Kernels,
) -> Tensor:  # fmt: skip
    """One decode step from tokens to tokens; the embedding is the head's weight."""
    plan = kernels.attention_plan(tables["lengths"], num_kv_heads=dims.num_key_value_heads)
    x = F.embedding(tokens, head.args[1])
    for layer in layers:
        qkv = kernels.linear(x, layer["qkv"], norm=layer["norm"])
        a = kernels.decode_attention(
            qkv, tables["cos"], tables["sin"], tables["rows"], layer["k"], layer["v"], tables["slots"],
            tables["blocks"], tables["lengths"], num_heads=dims.num_attention_heads, scale=dims.head_dim**-0.5,
            q_norm=layer["head_norm"], k_norm=layer["head_norm"], plan=plan,
        )  # fmt: skip
        x = kernels.linear(a.flatten(1), layer["o"], residual=x)
        h = kernels.gated_linear(x, layer["gate_up"], None, "silu", norm=layer["norm"])
        x = kernels.linear(h, layer["down"], residual=x)
    return kernels.argmax(kernels.linear(x, head.args[1], norm=head.kwargs["norm"]))


def measure_chain(dims: Dims, T: int, kernels: Kernels) -> dict[str, Any]:
    """One row: time of a step of T sequences with LENGTH keys each, from tokens to the greedy next ones."""
    from benchmarks.kernels import microseconds

    torch.manual_seed(0)
    attention = attention_problem(dims, T, LENGTH).build()
    blocks, lengths = attention.args[3:]
    angle = torch.rand(4096, dims.head_dim // 2, device=dims.device) * 6
    last = blocks[:, (LENGTH - 1) // PAGE] * PAGE + (LENGTH - 1) % PAGE
    tables = {"cos": angle.cos(), "sin": angle.sin(), "rows": lengths - 1, "slots": last, "blocks": blocks}
    tables["lengths"] = lengths
    layers = []
    for _ in range(dims.num_hidden_layers):
        layer: dict[str, Any] = {n: linear_problem(dims, n, T).build().args[1] for n in ("qkv", "o", "gate_up", "down")}
        k, v = attention_problem(dims, T, LENGTH).build().args[1:3]
        norms = {"norm": Norm(dims.randn(dims.hidden_size), 1e-6), "head_norm": Norm(dims.randn(dims.head_dim), 1e-6)}
        layers.append(layer | norms | {"k": k, "v": v})
    head = linear_problem(dims, "head", T).build()
    tokens = torch.arange(T, device=dims.device)
    us = microseconds(lambda _: step(tokens, layers, head, tables, dims, kernels), 1, launches=1, repeats=30)
    cached = T * LENGTH * dims.num_hidden_layers * 4 * dims.num_key_value_heads * dims.head_dim
    floor = (weight_bytes(SHAPES[dims.name]) + cached) / BANDWIDTH * 1e6
    row = {"op": "chain", "model": dims.name, "rows": T, "length": LENGTH, "us": round(us, 1)}
    return row | {"tokens_per_s": round(T / us * 1e6), "fraction": round(floor / us, 3)}
