"""Searches the cuts of the skinny products and of decode attention; prints lines for the tables of the kernels."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.kernel_problems import Dims, Problem, decode_problem, linear_problem, linear_shapes
from cuformers.kernels.attention_plan.reference import attention_plan
from cuformers.kernels.attention_plan.rule import Rule, balanced
from cuformers.kernels.decode_attention.triton import decode_attention
from cuformers.kernels.launch import sms
from cuformers.kernels.linear.config import MAX_ROWS, FmaConfig, MmaConfig, fma_config, mma_config
from cuformers.kernels.linear.skinny import FMA_ROWS, skinny
from cuformers.kernels.paged_attention.triton import AttentionConfig
from cuformers.kernels.paged_attention.triton import config as attention_rule

MOST = 24
"""Cuts that are tried for one shape."""


def fma_cuts(N: int, K: int, gated: bool) -> list[FmaConfig]:
    """Cuts worth a try: there are at least 100 programs, and a thread's weight bytes in flight are close to 96."""
    found = []
    for num_warps in (1, 2, 4, 8):
        for block_n in (1, 2, 4, 8, 16, 32):
            if -(-N // block_n) >= 100:
                cuts = _fma_cuts(block_n, K, num_warps)
                found += [(abs(math.log2(held * (1 + gated) / 96)), cut) for held, cut in cuts]
    return [cut for far, cut in sorted(found) if far <= 2.6][:MOST]


def _fma_cuts(block_n: int, K: int, num_warps: int) -> Iterator[tuple[float, FmaConfig]]:
    """(weight bytes of a thread, cut): warps that share a row, and up to 256 columns warps with rows of their own."""
    threads = 32 * num_warps
    for block_k in sorted({256, 256 * num_warps, 512 if num_warps > 2 else 256}):
        own_rows = block_k > 256 or block_n % num_warps == 0
        # A chunk gives every thread at least 8 columns, or the loads are narrower than 16 bytes.
        if K % block_k == 0 and own_rows and block_n * block_k >= threads * 8:
            yield block_n * K * 2 / threads, FmaConfig(block_n, block_k, num_warps)


def mma_cuts() -> list[MmaConfig]:
    """All cuts that registers have room for."""
    return [MmaConfig(num_warps, ahead) for num_warps in (2, 4, 8) for ahead in (1, 2, 4)]


class DecodeCut(NamedTuple):
    """How decode attention is cut into items, and a program's way through its keys."""

    rule: Rule
    cut: AttentionConfig


def decode_cuts(default: DecodeCut) -> list[DecodeCut]:
    """The default with other tiles, then with other stretches."""
    rule, cut = default
    tiles = ((32, 2, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 2))
    made = [
        AttentionConfig(block_s, num_warps, stages, early)
        for block_s, num_warps, stages in tiles
        for early in (True, False)
    ]
    rules = [rule._replace(long=long, least=least) for long in (1, 4, 8, 16) for least in (1, 2, 4) if least <= long]
    return [*(DecodeCut(rule, c) for c in made), *(DecodeCut(r, cut) for r in rules)]


def search(problem: Problem, cuts: list[Any], call: Callable[..., Any]) -> list[tuple[float, Any]]:
    """(microseconds, cut), best first; cuts that do not compile or fit are left out."""
    from benchmarks.kernels import argument_sets, microseconds

    sets = argument_sets(problem)
    found = []
    for cut in cuts:
        try:
            us = microseconds(lambda i, cut=cut: call(sets[i], cut), len(sets), repeats=5)
        except Exception as error:
            print(f"  {cut}: {type(error).__name__}", flush=True)
            continue
        found.append((us, cut))
    return sorted(found)


def report(problem: Problem, found: list[tuple[float, Any]], default: Any, add: Callable[..., None]) -> None:
    """A row with the best cut, the rule's own, and the runners-up."""
    if not found:
        add(op=problem.op, **problem.shape, failed="no cut ran")
        return
    rule = next((us for us, cut in found if cut == default), None)
    us, best = found[0]
    add(
        op=f"tune {problem.op}", **problem.shape, us=round(us, 2), gb_per_s=round(problem.bytes / us / 1e3),
        best=list(best), rule=list(default), rule_us=None if rule is None else round(rule, 2),
        next=[[round(u, 2), list(c)] for u, c in found[1:4]],
    )  # fmt: skip


def tune_linear(dims: Dims, name: str, T: int, add: Callable[..., None]) -> None:
    """One weight of a model at T rows."""
    problem = linear_problem(dims, name, T)
    N, K, gated = problem.shape["N"], problem.shape["K"], problem.op == "gated_linear"

    def call(arguments: Any, cut: FmaConfig | MmaConfig) -> None:
        x, weight = arguments.args[:2]
        skinny(x, weight, None, **arguments.kwargs, activation="silu" if gated else "none", cut=cut)

    shape = {"gated": gated, "num_sms": sms(dims.device)}
    few = T <= FMA_ROWS
    default = fma_config(N, K, T, **shape) if few else mma_config(N, K, **shape)
    cuts = fma_cuts(N, K, gated) if few else mma_cuts()
    found = search(problem, list(dict.fromkeys((default, *cuts))), call)
    report(problem, found, default, add)
    if found:
        print(f"    ({N}, {K}, {T}, {gated}): {found[0][1]},", flush=True)


def tune_decode(dims: Dims, N: int, length: int, add: Callable[..., None]) -> None:
    """Decode attention of a model at a batch size and length."""
    problem = decode_problem(dims, N, length)
    kv, D, num_sms = dims.num_key_value_heads, dims.head_dim, sms(dims.device)
    default = DecodeCut(balanced(N, kv, num_sms), attention_rule(N, kv, D, 2, num_sms=num_sms))
    cuts = list(dict.fromkeys((default, *decode_cuts(default))))
    lengths = problem.build().args[-1]
    plans = {c.rule: attention_plan(lengths, num_kv_heads=kv, rule=c.rule) for c in cuts}

    def call(arguments: Any, cut: DecodeCut) -> None:
        decode_attention(*arguments.args, **(arguments.kwargs | {"plan": plans[cut.rule]}), cut=cut.cut)

    found = search(problem, cuts, call)
    report(problem, found, default, add)
    for us, best in found[:3]:
        print(f"    N {N}, length {length}: {us:.2f} us, {best}", flush=True)


def tune(dims: Dims, rows: list[int], only: str | None, add: Callable[..., None]) -> None:
    """Everything that can be tuned for a model."""
    for T in rows:
        if T <= MAX_ROWS and (only is None or only in "gated_linear"):
            for name in linear_shapes(dims):
                tune_linear(dims, name, T, add)
        if only is None or only in "decode_attention":
            for length in (128, 256, 1024):
                tune_decode(dims, T, length, add)
