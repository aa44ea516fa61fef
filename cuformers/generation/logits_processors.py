"""Transformers' processor classes that look at the tokens so far: penalties, bans, and user-given constraints."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.generation import bans, checks, penalties
from cuformers.generation.logits_warpers import check_number
from cuformers.generation.processors import LogitsProcessor, RowProcessor
from cuformers.generation.rows import Rows


class RepetitionPenaltyLogitsProcessor(RowProcessor):
    """Makes tokens of prompt and answer less likely (penalty above 1) or more likely (below 1).

    Args:
        penalty: above 0.
        prompt_ignore_length: tokens at the beginning that do not count.
    """

    def __init__(self, penalty: float, prompt_ignore_length: int | None = None) -> None:
        self.penalty = check_number("penalty", penalty, "a number above 0", penalty > 0)
        start = prompt_ignore_length or 0
        holds = isinstance(start, int) and start >= 0
        self.start = check_number("prompt_ignore_length", start, "an integer from 0", holds)

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return penalties.repetition(scores, rows, self.penalty, start=int(self.start))


class PresencePenaltyLogitsProcessor(RowProcessor):
    """Subtracts `penalty` from every token that was generated: OpenAI's presence_penalty.

    Args:
        penalty: any number; negative ones favour repetition.
        prompt_length: tokens of the prompt, where the rows don't say themselves.
    """

    def __init__(self, penalty: float, prompt_length: int = 0) -> None:
        self.penalty, self.prompt_length = float(penalty), prompt_length

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return penalties.presence(scores, rows, self.penalty, start=_start(rows, self.prompt_length))


class FrequencyPenaltyLogitsProcessor(RowProcessor):
    """Subtracts `penalty` from a token once for each time it was generated: OpenAI's frequency_penalty.

    Args: as of PresencePenaltyLogitsProcessor.
    """

    def __init__(self, penalty: float, prompt_length: int = 0) -> None:
        self.penalty, self.prompt_length = float(penalty), prompt_length

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return penalties.frequency(scores, rows, self.penalty, start=_start(rows, self.prompt_length))


class NoRepeatNGramLogitsProcessor(RowProcessor):
    """Bans tokens that would repeat a run of `ngram_size` tokens."""

    def __init__(self, ngram_size: int) -> None:
        holds = isinstance(ngram_size, int) and ngram_size >= 1
        self.ngram_size = int(check_number("ngram_size", ngram_size, "an integer from 1", holds))

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return bans.no_repeat_ngram(scores, rows, self.ngram_size)


class SequenceBiasLogitsProcessor(RowProcessor):
    """Adds a bias to a sequence's last token where the rest of it comes before.

    Args:
        sequence_bias: {(token ids): bias} or [[[token ids], bias], ...].
    """

    def __init__(self, sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Any]) -> None:
        checks.check_option("sequence_bias", sequence_bias)
        pairs = sequence_bias.items() if isinstance(sequence_bias, Mapping) else sequence_bias
        self.sequence_bias = {tuple(ids): float(bias) for ids, bias in pairs}
        self._table = bans.BiasTable("sequence_bias", list(self.sequence_bias.items()))

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return self._table.add(scores, rows)


class NoBadWordsLogitsProcessor(RowProcessor):
    """Bans token sequences; one that is just an end-of-sequence token is left out, as in Transformers."""

    def __init__(
        self, bad_words_ids: Sequence[Sequence[int]], eos_token_id: int | Sequence[int] | Tensor | None = None
    ):
        checks.check_option("bad_words_ids", bad_words_ids)
        alone = {(i,) for i in token_ids(eos_token_id)}
        words = [tuple(ids) for ids in bad_words_ids if tuple(ids) not in alone]
        self._table = bans.BiasTable("bad_words_ids", [(ids, -math.inf) for ids in words])

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return self._table.add(scores, rows)


class SuppressTokensLogitsProcessor(RowProcessor):
    """Bans tokens; `device` is not needed here."""

    def __init__(self, suppress_tokens: Sequence[int] | Tensor, device: object = None) -> None:
        self._tokens = bans.TokenSet("suppress_tokens", token_ids(suppress_tokens))

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return scores.masked_fill(self._tokens.mask(scores), -math.inf)


class PrefixConstrainedLogitsProcessor(LogitsProcessor):
    """Allows only the tokens that a function names, given the batch row and its tokens.

    The function runs on the host, so this one waits for the device at every token.

    Args:
        prefix_allowed_tokens_fn: (row, tokens [L]) -> allowed token ids.
        num_beams: rows that share a row number.
    """

    def __init__(self, prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]], num_beams: int = 1) -> None:
        self._allowed, self._beams = prefix_allowed_tokens_fn, num_beams

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        mask = torch.full(scores.shape, -math.inf, dtype=scores.dtype)
        for row, tokens in enumerate(input_ids):
            allowed = list(self._allowed(row // self._beams, tokens))
            if not allowed:
                raise bad_argument("prefix_allowed_tokens_fn", allowed, f"at least one token for row {row}")
            bans.check_vocabulary("prefix_allowed_tokens_fn", allowed, scores.shape[-1])
            mask[row, allowed] = 0
        return scores + mask.to(scores.device)


class InfNanRemoveLogitsProcessor(RowProcessor):
    """Replaces nan by 0, and infinities by the largest and smallest number of the dtype."""

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        limits = torch.finfo(scores.dtype)
        return scores.nan_to_num(nan=0.0, posinf=limits.max, neginf=limits.min)


def token_ids(value: int | Sequence[int] | Tensor | None) -> tuple[int, ...]:
    """The ids of an int, a list, a tensor (read once, at construction) or None."""
    if value is None:
        return ()
    if isinstance(value, Tensor):
        return tuple(value.reshape(-1).tolist())
    return (value,) if isinstance(value, int) else tuple(int(i) for i in value)


def _start(rows: Rows, prompt_length: int) -> int | None:
    return None if rows.prompt_lengths is not None else prompt_length
