"""How busy the GPU is while all requests decode, from a profiler's trace of the engine's own loop.

    python -m benchmarks.steady_state --shapes qwen3-0.6b qwen3-8b --rows 1 32 256 --trace benchmarks/results/traces

The share of the time in which at least one kernel or copy runs, from the first one's start to the last one's end.
"""

import argparse
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.generate import gate, ours
from benchmarks.rows import Rows, parser
from benchmarks.shapes import SHAPES
from cuformers.engine.request import Request

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on a GPU in a trace."""
KEPT = ("name", "cat", "ph", "ts", "dur", "pid", "tid")
"""Fields that are kept of an event."""


class Busy(NamedTuple):
    """What a trace says."""

    fraction: float
    """Of the span in which something ran."""
    longest_gap_us: float
    """The longest time in which nothing did."""
    step_us: float
    """The span over the steps."""


def busy(events: list[dict[str, Any]], steps: int) -> Busy:
    """How busy the device was.

    Args:
        events: with `ts` and `dur`, microseconds, in any order; they may overlap.
        steps: that they belong to.

    Example:
        >>> busy([{"ts": 0, "dur": 4}, {"ts": 2, "dur": 3}, {"ts": 8, "dur": 2}], 2)
        Busy(fraction=0.7, longest_gap_us=3, step_us=5.0)
    """
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events)
    first, end = spans[0]
    idle, longest = 0, 0
    for start, stop in spans:
        gap = max(start - end, 0)
        idle, longest, end = idle + gap, max(longest, gap), max(end, stop)
    return Busy(1 - idle / (end - first), longest, (end - first) / steps)


def traced(model: Any, rows: int, length: int, steps: int) -> list[dict[str, Any]]:
    """What ran on the GPU in so many steps of the engine, of rows that all decode after prompts of a length."""
    engine = model.engine
    prompts = torch.randint(3, 10_000, (rows, length)).tolist()
    requests = [Request(prompt=prompt, max_new_tokens=200 + 4 * steps) for prompt in prompts]
    engine.reset()
    engine.reserve(requests)
    for request in requests:
        engine.add(request)
    while not all(r.generated for r in requests):
        engine.step()
    for _ in range(32):
        engine.step()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    engine.reset()
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return [{key: e[key] for key in KEPT if key in e} for e in events if e.get("cat") in ON_DEVICE]


def main() -> None:
    """Command line."""
    options = parser(__doc__ or "")
    options.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"], choices=sorted(SHAPES))
    options.add_argument("--rows", nargs="+", type=int, default=[1, 32, 256])
    options.add_argument("--length", type=int, default=500, help="tokens of each prompt")
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--trace", help="folder for the traces, which Perfetto opens")
    given: argparse.Namespace = options.parse_args()
    out = Rows(given)
    for name in given.shapes:
        gate(SHAPES[name])
        model = ours(SHAPES[name])
        for rows in given.rows:
            events = traced(model, rows, given.length, given.steps)
            found = busy(events, given.steps)
            out.add(
                what="steady-state", shape=name, rows=rows, length=given.length, busy=round(found.fraction, 4),
                longest_gap_us=round(found.longest_gap_us, 1), step_us=round(found.step_us, 1),
            )  # fmt: skip
            if given.trace:
                keep(events, Path(given.trace, f"steady-{name}-{rows}.json.gz"))
        del model
        torch.cuda.empty_cache()
    out.write()


def keep(events: list[dict[str, Any]], file: Path) -> None:
    """Writes the trace of the last few steps."""
    file.parent.mkdir(parents=True, exist_ok=True)
    last = sorted(events, key=lambda e: e["ts"])[-len(events) // 8 :]
    with gzip.open(file, "wt", compresslevel=9) as out:
        json.dump({"traceEvents": last}, out, separators=(",", ":"))


if __name__ == "__main__":
    main()
