"""`model.generate_batch`: many prompts at once, each with a result of its own."""

from collections.abc import Sequence
from typing import Any

from cuformers.auto.batching.listen import QueueChannel
from cuformers.auto.batching.manager import ContinuousBatchingManager
from cuformers.auto.batching.options import Options
from cuformers.auto.batching.output import GenerationOutput
from cuformers.auto.batching.progress import request_bar
from cuformers.auto.batching.submit import Terms
from cuformers.base.errors import bad_argument
from cuformers.generation.config import GenerationConfig

_LOOK = 0.2
"""Seconds between two looks at the engine's figures, where they are shown."""

Configs = GenerationConfig | Sequence[GenerationConfig | None] | None


def read_options(
    manager: ContinuousBatchingManager, configs: Configs, given: dict[str, Any], prompts: int
) -> Options | list[Options]:
    """The options of all prompts, or of each.

    Raises:
        ValueError: an option that does not exist, options that no prompt can run with, or a list of another length.
    """
    if not isinstance(configs, Sequence):
        options = manager.options(configs, given)
        manager.check_options(options, prompts)
        return options
    if len(configs) != prompts:
        raise bad_argument("generation_config", f"a list of {len(configs)}", f"one, or a list of {prompts}")
    return [manager.options(own, given) for own in configs]


def run_batch(
    manager: ContinuousBatchingManager,
    inputs: Sequence[Any],
    options: Options | list[Options],
    terms: Terms,
    *,
    progress_bar: bool,
) -> dict[str, GenerationOutput]:
    """Runs prompts in a manager that has started: their outputs by id, in the order of the prompts."""
    channel = QueueChannel()
    ids = manager.submit([(manager.new_id(), p) for p in inputs], options, terms, channel=channel, block=True)
    results: dict[str, GenerationOutput] = {}
    before = manager.num_generated_tokens
    with request_bar(len(ids), progress_bar) as bar:
        while len(results) < len(ids):
            for delivery in channel.get(_LOOK if progress_bar else None):
                results[delivery.request_id] = delivery.output()
            bar.show(len(results), manager.num_generated_tokens - before, manager.stats)
    return {request_id: results[request_id] for request_id in ids}
