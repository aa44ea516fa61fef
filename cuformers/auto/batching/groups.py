"""Logits processors for requests that come one by one: those that ask for the same share a group."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from cuformers.engine.group import Group
from cuformers.generation.build import build_processors
from cuformers.generation.fused import fused_penalties, fused_warpers
from cuformers.generation.processors import LogitsProcessorList
from cuformers.generation.resolved import ResolvedGeneration
from cuformers.generation.rows import Rows

_MANY = 2
"""Tokens of a prompt that is no edge case. Rows carry their own lengths, so that processors use no other."""
_NO_PROCESSOR: Mapping[str, Any] = {
    "prompt_length": _MANY,
    "max_time": None,
    "stop_strings": (),
    "pad_token_id": None,
    "bos_token_id": None,
    "seed": None,
    "num_return_sequences": 1,
    "output_logprobs": False,
}
"""Options that no processor looks at, with one value for all."""
_SAMPLER: Mapping[str, Any] = {"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Options that the sampler takes for each row, where no processor has to."""


class Groups:
    """The groups that were asked for last, by their options. For a model of one vocabulary; usable from any thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._made = lru_cache(maxsize=128)(self._make)

    def of(self, resolved: ResolvedGeneration) -> Group | None:
        """The group for a request's options; None where the device's ops are enough.

        Raises:
            ValueError: a processor can't work with this vocabulary.
        """
        return self._made(_processing(resolved)) if fused_penalties(resolved).eager else None

    def _make(self, resolved: ResolvedGeneration) -> Group:
        processors = build_processors(resolved, fused=True)
        self._rehearse(processors)
        return Group(processors=processors)

    def _rehearse(self, processors: LogitsProcessorList) -> None:
        """Runs the processors once, as one that fails inside a step would take all requests of the step with it."""
        length = torch.tensor([_MANY])
        rows = Rows(torch.zeros(1, _MANY, dtype=torch.int32), length, length)
        processors.process(rows, torch.zeros(1, self._vocab_size))


def _processing(resolved: ResolvedGeneration) -> ResolvedGeneration:
    """The options with everything that no processor looks at made alike."""
    same = dict(_NO_PROCESSOR)
    if not resolved.forced_eos_token_ids:
        same["max_new_tokens"] = 1
    if not fused_warpers(resolved).eager:
        same.update(_SAMPLER)
    return replace(resolved, **same)
