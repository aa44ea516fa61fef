"""Searches the cuts of the skinny products and of decode attention; prints lines for the tables of the kernels."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.kernel_problems import Dims, Problem, attention_problem, linear_problem, linear_shapes
from cuformers.kernels.linear.config import FMA_ROWS, MAX_ROWS, SkinnyConfig, config
from cuformers.kernels.linear.skinny import skinny
from cuformers.kernels.paged_attention import triton as attention
from cuformers.kernels.paged_attention.triton import AttentionConfig


def skinny_cuts(N: int, K: int, T: int, gated: bool) -> Iterator[SkinnyConfig]:
    """Cuts worth a try: a thread holds 16 to 192 bytes of weights, and there are at least 100 programs."""
    pairs = 2 if gated else 1
    for num_warps in (1, 2, 4, 8):
        threads = 32 * num_warps
        for block_n in (1, 2, 4, 8, 16, 32):
            if -(-N // block_n) < 100:
                continue
            if T > FMA_ROWS:
                for block_k in (32, 64, 128, 256):
                    held = block_n * block_k * num_warps * 2 * pairs / threads
                    if block_n >= 8 and num_warps >= 2 and 32 <= held <= 192 and block_k * num_warps <= 2 * K:
                        yield SkinnyConfig(block_n, block_k, num_warps, num_warps)
                continue
            held = block_n * K * 2 * pairs / threads
            for block_k in (256, 512, 1024, 2048):
                fits = K % block_k == 0 and 16 <= held <= 192
                own_rows = block_k > 256 or block_n % num_warps == 0
                # A chunk gives every thread at least 8 columns, or the loads are narrower than 16 bytes.
                if fits and own_rows and block_n * block_k >= threads * 8:
                    yield SkinnyConfig(block_n, block_k, 1, num_warps)


def attention_cuts() -> Iterator[AttentionConfig]:
    """Cuts of decode attention."""
    tiles = ((16, 2, 3), (32, 2, 3), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 8, 2))
    for splits in (1, 2, 4, 8, 16, 32):
        for block_s, num_warps, stages in tiles:
            yield AttentionConfig(splits, block_s, num_warps, stages)


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

    def call(arguments: Any, cut: SkinnyConfig) -> None:
        x, weight = arguments.args[:2]
        skinny(x, weight, None, **arguments.kwargs, activation="silu" if gated else "none", cut=cut)

    default = config(N, K, T, gated=gated)
    found = search(problem, list({default, *skinny_cuts(N, K, T, gated)}), call)
    report(problem, found, default, add)
    if found:
        print(f"    ({N}, {K}, {T}, {gated}): {found[0][1]},", flush=True)


def tune_attention(dims: Dims, N: int, length: int, add: Callable[..., None]) -> None:
    """Decode attention of a model at a batch size and length."""
    problem = attention_problem(dims, N, length, "here")

    def call(arguments: Any, cut: AttentionConfig) -> None:
        attention.paged_attention(*arguments.args, **arguments.kwargs, cut=cut)

    default = attention.config(N, dims.num_key_value_heads, dims.head_dim)
    report(problem, search(problem, list({default, *attention_cuts()}), call), default, add)


def tune(dims: Dims, rows: list[int], only: str | None, add: Callable[..., None]) -> None:
    """Everything that can be tuned for a model."""
    for T in rows:
        if T <= MAX_ROWS and (only is None or only in "gated_linear"):
            for name in linear_shapes(dims):
                tune_linear(dims, name, T, add)
        if only is None or only in "paged_attention":
            for length in (256, 1024, 8192):
                tune_attention(dims, T, length, add)
