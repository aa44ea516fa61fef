"""`cuformers bench WORK [MODEL]`: measures a model on this machine, beside the least time that the work could take."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from cuformers.base.errors import bad_argument
from cuformers.cli.model_flags import add_model_flags, load_model
from cuformers.cli.parser import verb_parser

if TYPE_CHECKING:
    from cuformers.auto.model import PreTrainedModel
    from cuformers.cli.offline_works import Work
    from cuformers.cuda.rates import Rates

ABOUT = "Measures generation. serve-offline: many requests at once, through the engine, end-of-text tokens ignored."


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one work gave."""

    work: str
    """Its name."""
    requests: int
    """Requests, all there from the start."""
    prompt_tokens: int
    """Of all prompts."""
    new_tokens: int
    """Generated in all."""
    seconds: float
    """From the first request's submission to the last one's end."""
    new_tokens_per_second: float
    """Generated tokens in that time."""
    floor_seconds: float
    """The least that the device's memory and arithmetic allow."""
    fraction_of_floor: float
    """The latter by the former: 1 is the limit."""
    peak_bytes: int
    """The most memory that this process had taken of the device."""


def main(argv: Sequence[str]) -> int:
    """Measures.

    Args:
        argv: arguments after the verb.

    Returns:
        0.

    Raises:
        ValueError: arguments or a checkpoint that are not possible.
    """
    arguments = _parser().parse_args(argv)
    if arguments.requests < 1:
        raise bad_argument("--requests", arguments.requests, "an integer from 1")
    model = _model(arguments)
    from cuformers.cli.offline_works import WORKS
    from cuformers.cuda.rates import measure

    rates = measure(model.device, model.dtype)
    works = {name: WORKS[name](arguments.requests, model.config.vocab_size) for name in arguments.works}
    figures = [serve_offline(model, name, work, rates) for name, work in works.items()]
    if arguments.json:
        print(json.dumps({"rates": rates._asdict(), "works": [asdict(f) for f in figures]}))
        return 0
    from cuformers.cli.tables import make_console, show

    shown = [{**asdict(f), **_rounded(f)} for f in figures]
    measured = f"{rates.bytes_per_second / 1e12:.2f} TB/s, {rates.flops / 1e12:,.0f} TFLOP/s, measured"
    show({"serve-offline": shown, "floor": {"rates": measured}}, make_console())
    return 0


def serve_offline(model: "PreTrainedModel", name: str, work: "Work", rates: "Rates") -> Figures:
    """Runs a work twice, the first time to compile and capture, and measures the second."""
    from cuformers.cli.offline_works import floor_seconds
    from cuformers.cuda.memory import peak_bytes

    seconds = [_run(model, work) for _ in range(2)][-1]
    floor, new = floor_seconds(model, work, rates), sum(work.new_tokens)
    return Figures(
        work=name,
        requests=len(work.prompts),
        prompt_tokens=sum(map(len, work.prompts)),
        new_tokens=new,
        seconds=seconds,
        new_tokens_per_second=new / seconds,
        floor_seconds=floor,
        fraction_of_floor=floor / seconds,
        peak_bytes=peak_bytes(model.device),
    )


def _run(model: "PreTrainedModel", work: "Work") -> float:
    """Seconds of one run; raises where a request did not give all its tokens."""
    from cuformers.generation.batching_config import ContinuousBatchingConfig
    from cuformers.generation.config import GenerationConfig

    alone = ContinuousBatchingConfig(allow_block_sharing=False)  # a second run would find the prompts of the first
    configs = [GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None) for new in work.new_tokens]
    start = perf_counter()
    outputs = model.generate_batch(work.prompts, configs, alone, persistent_manager=True)
    seconds = perf_counter() - start
    for output, new in zip(outputs.values(), work.new_tokens):
        if len(output.generated_tokens) != new:
            raise ValueError(f"{output.request_id} gave {len(output.generated_tokens)} of {new}: {output.error}")
    return seconds


def _model(arguments: argparse.Namespace) -> "PreTrainedModel":
    if arguments.model is None:
        from cuformers.auto.builtin import builtin_folder

        return load_model(builtin_folder(), arguments)
    if not arguments.random_weights:
        return load_model(arguments.model, arguments)
    from cuformers.auto.causal_lm import AutoModelForCausalLM
    from cuformers.auto.config import AutoConfig

    config = AutoConfig.from_pretrained(arguments.model, revision=arguments.revision)
    return AutoModelForCausalLM.from_config(
        config,
        dtype=arguments.dtype,
        device_map=arguments.device,
        attn_implementation=arguments.attn_implementation,
        kernels=arguments.kernels,
        seed=0,
    )


def _rounded(figures: Figures) -> dict[str, str]:
    return {
        "seconds": f"{figures.seconds:.2f}",
        "new_tokens_per_second": f"{figures.new_tokens_per_second:,.0f}",
        "floor_seconds": f"{figures.floor_seconds:.2f}",
        "fraction_of_floor": f"{figures.fraction_of_floor:.1%}",
    }


def _parser() -> argparse.ArgumentParser:
    parser = verb_parser("bench", ABOUT)
    parser.add_argument("kind", choices=("serve-offline",), help="what to measure")
    parser.add_argument("model", nargs="?", help="folder or hub id; none for the built-in model")
    parser.add_argument("--random-weights", action="store_true", help="read the model's config.json only")
    parser.add_argument(
        "--works", nargs="+", choices=("even", "mixed"), default=["even", "mixed"],
        help="even: 1024 tokens in, 1024 out; mixed: both uniform in 100..1024, from seed 0",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=256, help="of each work; default 256")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    add_model_flags(parser)
    return parser
