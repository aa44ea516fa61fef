"""Why a request may end beside its tokens and its length: text that the host reads, and time."""

from collections.abc import Sequence
from time import perf_counter

import torch

from cuformers.engine.request import Request
from cuformers.generation.stopping import Decodes, StopStringCriteria

_MARGIN = 32
"""Tokens more than one a byte of the longest string, which is more than StopStringCriteria reads."""


class StopStrings:
    """Whether the last token completes one of some strings, as `generate` finds it."""

    def __init__(self, tokenizer: Decodes, strings: Sequence[str]) -> None:
        self._criterion = StopStringCriteria(tokenizer, strings)
        self._window = max(len(s.encode()) for s in strings) + _MARGIN

    def __call__(self, request: Request) -> bool:
        new = request.generated[-self._window :]
        before = self._window - len(new)
        tail = request.prompt[-before:] + new if before else new
        return bool(self._criterion(torch.tensor([tail]), None))


class MaxTime:
    """Whether so many seconds have passed since the request was submitted."""

    def __init__(self, seconds: float) -> None:
        self._until = perf_counter() + seconds

    def __call__(self, request: Request) -> bool:
        return perf_counter() > self._until
