"""Tokens per second of `generate`, beside Transformers' in the same run.

    python -m benchmarks.generate --shapes qwen3-0.6b qwen3-8b --batches 1 32

A gate comes first: in float32 the kernels must give the tokens of the plain PyTorch path.
"""

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.rows import Rows, parser
from benchmarks.shapes import SHAPES, floor_seconds
from cuformers import AutoConfig, AutoModelForCausalLM


def gate(shape: dict[str, Any]) -> None:
    """Raises unless kernels and reference agree on 32 greedy tokens of two prompts, float32, 4 layers."""
    small = {**shape, "num_hidden_layers": 4, "vocab_size": 4096}
    config = AutoConfig.for_model(**small)
    model = AutoModelForCausalLM.from_config(config, dtype="float32", device_map="cuda", seed=0)
    ids = torch.randint(0, 4096, (2, 50), device="cuda")
    tokens = model.generate(ids, max_new_tokens=32, eos_token_id=None, pad_token_id=0, do_sample=False)
    model.set_kernels("reference")
    model.set_attn_implementation("eager")
    expected = model.generate(ids, max_new_tokens=32, eos_token_id=None, pad_token_id=0, do_sample=False)
    if not torch.equal(tokens, expected):
        raise SystemExit(f"the gate failed: {(tokens != expected).sum()} of {tokens.numel()} tokens differ")


def timed(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Seconds of the first call, and the median of the later ones."""
    seconds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds[0], sorted(seconds[1:])[repeats // 2]


def ours(shape: dict[str, Any]) -> Any:
    """Our model of a shape, random bf16 weights."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype="bfloat16", device_map="cuda", seed=0)


def peer(shape: dict[str, Any]) -> Any:
    """Transformers' model of the same shape."""
    import transformers

    config = transformers.AutoConfig.for_model(**shape)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    return model.eval()


def measure(rows: Rows, name: str, who: str, model: Any, options: argparse.Namespace, **kwargs: Any) -> None:
    """One row for each batch size."""
    shape, new = SHAPES[name], options.new
    for batch in options.batches:
        ids = torch.randint(0, 150000 % shape["vocab_size"], (batch, options.prompt), device="cuda")
        mask = torch.ones_like(ids)
        arguments = dict(
            input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        first, seconds = timed(partial(model.generate, **arguments, **kwargs), options.repeats)
        rows.add(
            what="generate", shape=name, who=who, batch=batch, prompt=options.prompt, new=new,
            seconds=round(seconds, 5), first_call_seconds=round(first, 3),
            tokens_per_second=round(batch * new / seconds, 1),
            fraction_of_floor=round(floor_seconds(shape, batch, options.prompt, new) / seconds, 4),
        )  # fmt: skip


def main() -> None:
    """Command line."""
    options = parser(__doc__ or "")
    options.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"], choices=sorted(SHAPES))
    options.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    options.add_argument("--prompt", type=int, default=128)
    options.add_argument("--new", type=int, default=128)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--lookup", type=int, help="also with so many tokens looked up")
    options.add_argument("--no-peer", action="store_true", help="leave Transformers out")
    options.add_argument("--static", action="store_true", help="also Transformers' static cache with torch.compile")
    given = options.parse_args()
    rows = Rows(given)
    for name in given.shapes:
        gate(SHAPES[name])
        model = ours(SHAPES[name])
        measure(rows, name, "cuformers", model, given)
        if given.lookup:
            who = f"cuformers, {given.lookup} tokens looked up"
            measure(rows, name, who, model, given, prompt_lookup_num_tokens=given.lookup)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        if not given.no_peer:
            other = peer(SHAPES[name])
            given.repeats, repeats = 1, given.repeats
            measure(rows, name, "transformers", other, given)
            if given.static:
                measure(rows, name, "transformers static+compile", other, given, cache_implementation="static")
            given.repeats = repeats
            del other
            gc.collect()
            torch.cuda.empty_cache()
    rows.write()


if __name__ == "__main__":
    main()
