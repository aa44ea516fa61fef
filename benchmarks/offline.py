"""Tokens per second of many requests at once, beside the floor, and beside Transformers in the same run.

    python -m benchmarks.offline --shapes qwen3-0.6b qwen3-8b --works mixed even

A gate comes first: in float32 the engine must give each request the tokens that it gets alone in plain PyTorch.
"""

import argparse
import gc
import time
from typing import Any

import torch

from benchmarks.rows import Rows, parser
from benchmarks.shapes import SHAPES
from cuformers import AutoConfig, AutoModelForCausalLM
from cuformers.cli.offline_works import WORKS, Work, floor_seconds
from cuformers.cuda.rates import Rates, measure
from cuformers.engine.request import Request


def gate(shape: dict[str, Any]) -> None:
    """Raises unless requests of many lengths get their own tokens: float32, 4 layers, a pool that makes them wait."""
    small = {**shape, "num_hidden_layers": 4, "vocab_size": 4096}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small), dtype="float32", device_map="cuda", seed=0)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 4096, (n,), generator=draw).tolist() for n in (7, 300, 64, 129, 1, 1000, 33, 500)]
    together = [Request(prompt=p, max_new_tokens=24 + 8 * i) for i, p in enumerate(prompts)]
    model.engine.run(together)
    model.set_kernels("reference")
    for request in together:
        alone = Request(prompt=request.prompt, max_new_tokens=request.max_new_tokens)
        model.engine.run([alone])
        if alone.generated != request.generated:
            raise SystemExit(f"the gate failed for a prompt of {len(request.prompt)} tokens")


def run(model: Any, work: Work) -> float:
    """Seconds from the first request's submission to the last one's end."""
    requests = [Request(prompt=p, max_new_tokens=new) for p, new in zip(work.prompts, work.new_tokens)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.engine.run(requests)
    seconds = time.perf_counter() - start
    assert all(len(r.generated) == new for r, new in zip(requests, work.new_tokens))
    return seconds


def shortened(work: Work, share: int) -> Work:
    """The same prompts with shorter answers, to compile and to capture."""
    return Work(prompts=work.prompts, new_tokens=[max(2, new // share) for new in work.new_tokens])


def ours(rows: Rows, name: str, works: list[str], rates: Rates, repeats: int, *, deterministic: bool = False) -> None:
    """One row for each work: the best of some runs, as each takes long."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SHAPES[name]), dtype="bfloat16", device_map="cuda", seed=0
    )
    model.set_deterministic(deterministic)
    who = "cuformers, deterministic" if deterministic else "cuformers"
    for kind in works:
        work = WORKS[kind](256)
        model.engine.reserve([Request(prompt=p, max_new_tokens=n) for p, n in zip(work.prompts, work.new_tokens)])
        first = run(model, shortened(work, 32))
        run(model, shortened(work, 32))
        seconds = min(run(model, work) for _ in range(repeats))
        add(rows, name, kind, who, model, work, seconds, rates, first, **memory_of(model))


def memory_of(model: Any) -> dict[str, float]:
    """GiB that graphs, activations and the table took beside weights and cache, and what the engine leaves for them."""
    engine, device = model.engine, model.device
    weights = sum(p.nbytes for p in {p.data_ptr(): p for p in model.parameters()}.values())
    took = torch.cuda.memory_reserved(device) - weights - engine.runner.cache_bytes
    left = engine.beside_cache(engine.runner.capacity)
    return {"gib_beside_cache": round(took / 2**30, 2), "gib_left_for_it": round(left / 2**30, 2)}


def add(
    rows: Rows,
    name: str,
    kind: str,
    who: str,
    model: Any,
    work: Work,
    seconds: float,
    rates: Rates,
    first: float,
    **more: float,
) -> None:
    """One measurement."""
    new = sum(work.new_tokens)
    rows.add(
        what="serve-offline", shape=name, work=kind, who=who, requests=len(work.prompts),
        prompt_tokens=sum(map(len, work.prompts)), new_tokens=new, seconds=round(seconds, 3),
        first_call_seconds=round(first, 2), tokens_per_second=round(new / seconds, 1),
        fraction_of_floor=round(floor_seconds(model, work, rates) / seconds, 4), rates=rates._asdict(), **more,
    )  # fmt: skip


def peer(rows: Rows, name: str, count: int, new: int) -> None:
    """Transformers' generate_batch on the first requests of the mixed work, cut to fewer tokens: it is slow."""
    import transformers

    from benchmarks.generate import peer as build

    model = build(SHAPES[name])
    work = WORKS["mixed"](256)
    prompts = work.prompts[:count]
    config = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    seconds = time.perf_counter() - start
    rows.add(
        what="serve-offline", shape=name, work="mixed, cut", who="transformers", requests=count,
        prompt_tokens=sum(map(len, prompts)), new_tokens=count * new, seconds=round(seconds, 3),
        tokens_per_second=round(count * new / seconds, 1),
    )  # fmt: skip


def main() -> None:
    """Command line."""
    options = parser(__doc__ or "")
    options.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"], choices=sorted(SHAPES))
    options.add_argument("--works", nargs="+", default=["mixed"], choices=sorted(WORKS))
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument("--deterministic", action="store_true", help="also with deterministic=True")
    options.add_argument("--peer", nargs=2, type=int, metavar=("REQUESTS", "NEW"), help="also Transformers, so much")
    options.add_argument("--no-gate", action="store_true", help="for a second run on the same machine")
    given: argparse.Namespace = options.parse_args()
    rows, rates = Rows(given), measure(torch.device("cuda", 0), torch.bfloat16)
    for name in given.shapes:
        if not given.no_gate:
            gate(SHAPES[name])
        for deterministic in (False, True) if given.deterministic else (False,):
            ours(rows, name, given.works, rates, given.repeats, deterministic=deterministic)
            gc.collect()
            torch.cuda.empty_cache()
        if given.peer:
            peer(rows, name, *given.peer)
    rows.write()


if __name__ == "__main__":
    main()
