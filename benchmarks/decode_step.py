"""Microseconds of whole decode steps as captured graphs, by rows; where the time goes; and what each cut would change.

    python -m benchmarks.decode_step --shapes qwen3-0.6b --rows 1 8 32
    python -m benchmarks.decode_step --rows 1 --kernels          # time by kernel
    python -m benchmarks.decode_step --rows 1 32 --tune          # other cuts of decode attention

A cut that wins alone may lose in a step, where kernels overlap: what counts is measured here.
"""

import argparse
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.generate import ours
from benchmarks.rows import Rows, parser
from benchmarks.shapes import SHAPES
from cuformers.engine.request import Request
from cuformers.engine.runner import Mode, Runner
from cuformers.kernels.paged_attention import triton as attention
from cuformers.kernels.paged_attention.triton import AttentionConfig

GREEDY = Mode(sample=True, greedy=True)
CUTS = tuple(
    AttentionConfig(block_s, warps, stages, early)
    for block_s, warps, stages in ((64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 2, 3), (64, 8, 2), (128, 4, 2))
    for early in (False, True)
)


def filled(model: Any, rows: int, length: int) -> Runner:
    """The engine's runner with so many rows that decode after prompts of a length."""
    engine = model.engine
    prompts = torch.randint(3, 10_000, (rows, length)).tolist()
    requests = [Request(prompt=prompt, max_new_tokens=3000) for prompt in prompts]
    engine.reset()
    engine.reserve(requests)
    for request in requests:
        engine.add(request)
    while not all(request.generated for request in requests):
        engine.step()
    for _ in range(4):
        engine.step()
    return engine.runner


def step_us(runner: Runner, rows: int, steps: int = 200, repeats: int = 5) -> float:
    """The best mean of some runs of captured steps; the rows' state is put back after each, so that lengths stay."""
    state = runner.table.decode
    kept = {name: x.clone() for name, x in state.tensors()}
    for _ in range(3):
        runner.step((), rows, GREEDY)
    best = float("inf")
    for _ in range(repeats):
        for name, x in state.tensors():
            x.copy_(kept[name])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            runner.step((), rows, GREEDY)
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / steps * 1e3)
    for name, x in state.tensors():
        x.copy_(kept[name])
    return best


def kernels(runner: Runner, rows: int, most: int = 14) -> list[tuple[str, float, float]]:
    """(name, launches a step, us a step) of the kernels that take most."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(5):
            runner.step((), rows, GREEDY)
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total]
    events.sort(key=lambda event: -event.self_device_time_total)
    return [(e.key[:70], e.count / 5, e.self_device_time_total / 5) for e in events[:most]]


def tried(model: Any, rows: int, length: int, cut: AttentionConfig) -> float | str:
    """The step with this cut of decode attention; the error's last line where it can't be had."""
    rule: Callable[..., AttentionConfig] = lambda *_, **__: cut  # noqa: E731
    model.engine.runner = None  # its graphs hold another cut
    try:
        with patch.object(attention, "config", rule):
            return round(step_us(filled(model, rows, length), rows), 1)
    except (OutOfResources, RuntimeError) as error:
        return str(error).strip().splitlines()[-1][:100]


@torch.no_grad()
def main() -> None:
    """Command line."""
    options = parser(__doc__ or "")
    options.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"], choices=sorted(SHAPES))
    options.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 256])
    options.add_argument("--length", type=int, default=200, help="tokens of each row's prompt")
    options.add_argument("--kernels", action="store_true", help="also the time by kernel")
    options.add_argument("--tune", action="store_true", help="also other cuts of decode attention")
    given: argparse.Namespace = options.parse_args()
    out = Rows(given)
    for name in given.shapes:
        model = ours(SHAPES[name])
        for rows in given.rows:
            runner = filled(model, rows, given.length)
            us = round(step_us(runner, rows), 1)
            out.add(what="decode-step", shape=name, rows=rows, length=given.length, us=us)
            for kernel, count, time in kernels(runner, rows) if given.kernels else ():
                print(f"  {time:9.1f} us {count:6.1f} times  {kernel}", flush=True)
            for cut in CUTS if given.tune else ():
                print(f"  {tuple(cut)} {tried(model, rows, given.length, cut)}", flush=True)
            if given.tune:
                model.engine.runner = None
    out.write()


if __name__ == "__main__":
    main()
