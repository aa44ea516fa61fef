"""Microseconds, bandwidth and its fraction of the limit for every op of a decode step, and for whole chains of them.

    python -m benchmarks.kernels [--only linear] [--models qwen3-0.6b] [--no-pdl] [--out rows.jsonl]
    python -m benchmarks.kernels --tune --rows 1 --only linear (or decode_attention)

Each row passes a gate first: the kernel's result against the reference on inputs lifted to float32. Times are of CUDA
graphs with many launches in a row that rotate among argument sets too large for the second-level cache. Without a GPU
`--dry-run` walks through everything, shrunk, in Triton's interpreter (TRITON_INTERPRET=1).
"""

import argparse
import json
import statistics
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_problems import Arguments, Dims, Problem, problems
from benchmarks.rows import Rows, parser
from benchmarks.shapes import BANDWIDTH
from cuformers.kernels import launch
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.op import Problem as OpProblem
from cuformers.kernels.table import Kernels, reference, select

COLD = 120e6
"""Bytes that the rotating sets add up to: more than twice the 50 MB of second-level cache of an H200."""
TOLERANCE = 1.5e-2
"""Greatest relative error of a bf16 result."""


def run(function: Callable, arguments: Arguments) -> list[Tensor]:
    """Results of a call, as a list."""
    out = function(*arguments.args, **arguments.kwargs)
    return list(out) if isinstance(out, tuple) else [out]


def lifted(value: Any) -> Any:
    """A copy in float32 of whatever is bf16."""
    if isinstance(value, Norm):
        return Norm(value.weight.float(), value.eps, value.offset)
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value.clone()
    return value


def gate(problem: Problem, kernels: Kernels, arguments: Arguments) -> float:
    """Greatest relative error of the results; raises above the tolerance."""
    oracle = Arguments(tuple(lifted(a) for a in arguments.args), {k: lifted(v) for k, v in arguments.kwargs.items()})
    expected = run(getattr(reference(), problem.op), oracle)
    # An op may write to what it is given: a cache, the residual.
    copies = [a.clone() if isinstance(a, Tensor) else a for a in (*arguments.args, *arguments.kwargs.values())]
    count = len(arguments.args)
    ours = Arguments(tuple(copies[:count]), dict(zip(arguments.kwargs, copies[count:])))
    worst = 0.0
    for out, want in zip(run(getattr(kernels, problem.op), ours), expected):
        if not out.is_floating_point():
            wrong = (out != want).float().mean().item()
            if wrong > 0:
                raise ValueError(f"{wrong:.1%} of the tokens differ")
            continue
        error = ((out.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9)).item()
        if not error <= TOLERANCE:
            raise ValueError(f"relative error {error:.2e}")
        worst = max(worst, error)
    return worst


def microseconds(call: Callable[[int], Any], sets: int, *, launches: int = 40, repeats: int = 9) -> float:
    """Time of one call, call(i) being with argument set i: the median over replays of a graph of many calls."""
    from cuformers.cuda.graphs import capture

    launches = max(launches, sets)
    captured = capture(lambda: [call(i % sets) for i in range(launches)])
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        captured.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[1:])


def argument_sets(problem: Problem) -> list[Arguments]:
    """Enough sets of arguments that none stays in the cache until its next turn."""
    return [problem.build() for _ in range(max(1, min(64, int(COLD // problem.bytes))))]


def measure(problem: Problem, kernels: Kernels, *, dry: bool) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    sets = [problem.build()] if dry else argument_sets(problem)
    row: dict[str, Any] = {"op": problem.op, **problem.shape, "error": float(f"{gate(problem, kernels, sets[0]):.2e}")}
    if dry:
        return row
    us = microseconds(lambda i: run(getattr(kernels, problem.op), sets[i]), len(sets))
    row |= {"us": round(us, 2), "gb_per_s": round(problem.bytes / us / 1e3)}
    row["fraction"] = round(problem.bytes / us * 1e6 / BANDWIDTH, 3)
    if problem.peer:
        plain = getattr(reference(), problem.op)
        row["torch_us"] = round(microseconds(lambda i: run(plain, sets[i]), len(sets)), 2)
    return row


def attempt(what: str, work: Callable[[], dict[str, Any]], add: Callable[..., None]) -> bool:
    """Adds the row of the work, or one that says why there is none; a failing row does not stop the rest."""
    try:
        add(**work())
        return True
    except Exception as error:
        traceback.print_exc(limit=3)
        add(row=what, failed=f"{type(error).__name__}: {error}"[:300])
        return False


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 where a row failed."""
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--only", help="only ops whose name contains this ('chain' for the chains)")
    options.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    options.add_argument("--no-pdl", action="store_true", help="ordinary launches")
    options.add_argument("--dry-run", action="store_true", help="gates only, shrunk, on the CPU")
    options.add_argument("--tune", action="store_true", help="search the skinny products' and decode attention's cuts")
    options.add_argument("--rows", nargs="+", type=int, default=[1], help="batch sizes to tune")
    args = options.parse_args(argv)
    if args.no_pdl:
        launch.use_pdl = lambda device: False  # type: ignore[assignment]
    dry = args.dry_run
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    if dry:
        add: Callable[..., None] = lambda **row: print(json.dumps(row))  # noqa: E731
    else:
        rows = Rows(args)
        add = rows.add
    kernels = select(OpProblem(device="cuda", capability=(9, 0), dtype=torch.bfloat16), "triton")
    fine = True
    for name in args.models:
        dims = Dims(name, device, 64 if dry else 1)
        if args.tune:
            from benchmarks.kernel_tuning import tune

            tune(dims, args.rows, args.only, add)
            continue
        for problem in problems(dims, args.only):
            if dry and (problem.shape.get("length", 0) > 256 or problem.shape["rows"] not in (1, 8)):
                continue
            what = f"{problem.op} {problem.shape}"
            fine &= attempt(what, lambda problem=problem: measure(problem, kernels, dry=dry), add)
        if not dry and (args.only is None or args.only in "chain"):
            from benchmarks.kernel_chain import measure_chain

            for T in (1, 8, 32):
                fine &= attempt(f"chain {name} {T}", lambda T=T, dims=dims: measure_chain(dims, T, kernels), add)
    if not dry:
        rows.write()
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
