"""Transformers' processor classes that act at certain lengths: minimum lengths, forced tokens, the pull to an end."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cuformers.generation.bans import TokenSet
from cuformers.generation.logits_processors import token_ids
from cuformers.generation.logits_warpers import check_number
from cuformers.generation.processors import RowProcessor
from cuformers.generation.rows import Rows

Eos = int | Sequence[int] | Tensor


def _apply_if(condition: Tensor | bool, change: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    """The changed scores in the rows where the condition holds: a bool for all rows, or [B, 1]."""
    if isinstance(condition, bool):
        return change(scores) if condition else scores
    return torch.where(condition, change(scores), scores)


class MinLengthLogitsProcessor(RowProcessor):
    """Bans end-of-sequence tokens while a row has fewer than `min_length` tokens; `device` is not needed here."""

    def __init__(self, min_length: int, eos_token_id: Eos, device: object = None) -> None:
        holds = isinstance(min_length, int) and min_length >= 0
        self.min_length = int(check_number("min_length", min_length, "an integer from 0", holds))
        # An end-of-sequence id outside the vocabulary can't be generated anyway.
        self._eos = TokenSet("eos_token_id", token_ids(eos_token_id), strict=False)

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return _apply_if(rows.length < self.min_length, self._ban, scores)

    def _ban(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self._eos.mask(scores), -math.inf)


class MinNewTokensLengthLogitsProcessor(MinLengthLogitsProcessor):
    """Bans end-of-sequence tokens until `min_new_tokens` were generated; `device` is not needed here."""

    def __init__(
        self, prompt_length_to_skip: int, min_new_tokens: int, eos_token_id: Eos, device: object = None
    ) -> None:
        for name, value in {"prompt_length_to_skip": prompt_length_to_skip, "min_new_tokens": min_new_tokens}.items():
            check_number(name, value, "an integer from 0", isinstance(value, int) and value >= 0)
        super().__init__(min_new_tokens, eos_token_id)
        self.prompt_length_to_skip, self.min_new_tokens = prompt_length_to_skip, min_new_tokens

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return _apply_if(rows.generated(self.prompt_length_to_skip) < self.min_new_tokens, self._ban, scores)


class ForcedBOSTokenLogitsProcessor(RowProcessor):
    """Forces a token after a prompt of one token."""

    def __init__(self, bos_token_id: int) -> None:
        self._bos = TokenSet("forced_bos_token_id", (bos_token_id,))

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return _apply_if(rows.length == 1, lambda s: self._bos.force(s).expand_as(s), scores)


class ForcedEOSTokenLogitsProcessor(RowProcessor):
    """Forces one of some tokens at the last place.

    Args:
        max_length: most tokens of prompt and answer.
        eos_token_id: one or more token ids.
        device: not needed here.
        max_new_tokens: most tokens of the answer; used for rows that know their prompt's length.
    """

    def __init__(self, max_length: int, eos_token_id: Eos, device: object = None, *, max_new_tokens: int | None = None):
        self._eos = TokenSet("forced_eos_token_id", token_ids(eos_token_id))
        self.max_length, self.max_new_tokens = max_length, max_new_tokens

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        if rows.prompt_lengths is not None and self.max_new_tokens is not None:
            last = rows.generated(0) == self.max_new_tokens - 1
        else:
            last = rows.length == self.max_length - 1
        return _apply_if(last, lambda s: self._eos.force(s).expand_as(s), scores)


class ExponentialDecayLengthPenalty(RowProcessor):
    """Makes end-of-sequence tokens likelier the longer an answer gets.

    Args:
        exponential_decay_length_penalty: (start, factor): after `start` generated tokens, each end-of-sequence score
            grows by its magnitude times factor ** (tokens past the start) - 1.
        eos_token_id: one or more token ids.
        input_ids_seq_length: tokens of the prompt.
    """

    def __init__(
        self, exponential_decay_length_penalty: tuple[int, float], eos_token_id: Eos, input_ids_seq_length: int
    ) -> None:
        self.start, self.factor = exponential_decay_length_penalty
        self.prompt_length = input_ids_seq_length
        self._eos = TokenSet("eos_token_id", token_ids(eos_token_id), strict=False)

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        past = rows.generated(self.prompt_length) - self.start
        if isinstance(past, int):
            growth: Tensor | float = self.factor ** max(past, 0) - 1
        else:
            growth = torch.pow(self.factor, past.clamp(min=0).to(scores.dtype)) - 1
        grown = torch.where(self._eos.mask(scores), scores + scores.abs() * growth, scores)
        return _apply_if(past > 0, lambda _: grown, scores)


class SuppressTokensAtBeginLogitsProcessor(RowProcessor):
    """Bans tokens as the first of the answer.

    Args:
        begin_suppress_tokens: token ids.
        begin_index: tokens of the prompt.
        device: not needed here.
    """

    def __init__(self, begin_suppress_tokens: Sequence[int] | Tensor, begin_index: int, device: object = None) -> None:
        self._tokens = TokenSet("begin_suppress_tokens", token_ids(begin_suppress_tokens))
        self.begin_index = begin_index

    def set_begin_index(self, begin_index: int) -> None:
        """Moves the place where the ban holds."""
        self.begin_index = begin_index

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        first = rows.generated(self.begin_index) == 0
        return _apply_if(first, lambda s: s.masked_fill(self._tokens.mask(s), -math.inf), scores)
