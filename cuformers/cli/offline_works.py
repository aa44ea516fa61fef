"""Offline serving works: how many requests, how long; and the least time that each can take on a device."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cuformers.cuda.rates import Rates
from cuformers.nn.moe import MoE

if TYPE_CHECKING:
    from cuformers.auto.model import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests that are all there from the start; end-of-text tokens are ignored."""

    prompts: list[list[int]]
    """Token ids of each prompt."""
    new_tokens: list[int]
    """Tokens to generate for each."""


LARGEST_TOKEN = 10000
"""Of the prompts; the last one of smaller vocabularies."""


def even(count: int, vocab_size: int = LARGEST_TOKEN + 1, length: int = 1024, new: int = 1024) -> Work:
    """Requests of one size."""
    draw, largest = random.Random(0), min(LARGEST_TOKEN, vocab_size - 1)
    return Work(
        prompts=[[draw.randint(0, largest) for _ in range(length)] for _ in range(count)], new_tokens=[new] * count
    )


def mixed(count: int, vocab_size: int = LARGEST_TOKEN + 1, least: int = 100, most: int = 1024) -> Work:
    """Lengths of prompt and answer uniform in least..most, drawn as nano-vllm's benchmark draws them from seed 0."""
    draw, largest = random.Random(0), min(LARGEST_TOKEN, vocab_size - 1)
    prompts = [[draw.randint(0, largest) for _ in range(draw.randint(least, most))] for _ in range(count)]
    return Work(prompts=prompts, new_tokens=[draw.randint(least, most) for _ in range(count)])


WORKS: Mapping[str, Callable[..., Work]] = {"even": even, "mixed": mixed}
"""By the name that the command line gives them; made for a number of requests and a vocabulary."""


def floor_seconds(model: "PreTrainedModel", work: Work, rates: Rates) -> float:
    """The least time for a work, all of it running from the start: see docs/continuous-batching.md for the formula."""
    head, layers = model.lm_head.weight, _LayerWeights(model)
    active, tokens = layers.read_by(1), sum(work.new_tokens)
    running = [sum(new > step for new in work.new_tokens) for step in range(1, max(work.new_tokens))]
    keys = sum(_key_bytes(model, len(p), new) for p, new in zip(work.prompts, work.new_tokens))
    # The prompts give the first tokens.
    weights = 2 * ((tokens - len(work.prompts)) * active + tokens * head.numel()) / rates.flops
    read = sum(layers.read_by(rows) + head.numel() for rows in running)
    weights = max(weights, read * head.element_size() / rates.bytes_per_second)
    prefill = sum(2 * active * len(p) + _attention_flops(model, len(p)) for p in work.prompts)
    return keys / rates.bytes_per_second + weights + prefill / rates.flops


class _LayerWeights:
    """The layers' parameters, and how many of them are used: of experts, those that are chosen."""

    def __init__(self, model: "PreTrainedModel") -> None:
        blocks = [m for m in model.model.layers.modules() if isinstance(m, MoE)]
        sizes = [sum(p.numel() for p in block.experts.parameters()) for block in blocks]
        self.experts = [(size, b.top_k / len(b.experts.down_proj)) for size, b in zip(sizes, blocks)]
        self.others = sum(p.numel() for p in model.model.layers.parameters()) - sum(sizes)

    def read_by(self, rows: int) -> float:
        """Parameters that so many tokens use together, if each chooses its experts at random."""
        return self.others + sum(size * (1 - (1 - share) ** rows) for size, share in self.experts)


def _key_bytes(model: "PreTrainedModel", prompt: int, new: int) -> int:
    """Bytes of keys and values that the decode steps of one request read; its first token comes of the prompt."""
    size, count = model.lm_head.weight.element_size(), 0
    for spec in model.model.attention_specs:
        window = spec.window or prompt + new
        count += 2 * spec.num_kv_heads * spec.head_dim * sum(min(prompt + i, window) for i in range(1, new))
    return count * size


def _attention_flops(model: "PreTrainedModel", prompt: int) -> int:
    """Of the visible pairs of a prompt: two products of 2 * head_dim for each query head."""
    total = 0
    for spec in model.model.attention_specs:
        window = min(spec.window or prompt, prompt)
        pairs = window * prompt - window * (window - 1) // 2
        total += 4 * spec.num_heads * spec.head_dim * pairs
    return total
