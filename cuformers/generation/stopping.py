"""Stopping criteria: Transformers' interface for saying that a row is finished."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cuformers.base.log import notice
from cuformers.generation.logits_processors import token_ids

_INCOMPLETE = "\ufffd"  # what decoders put for the bytes of an unfinished character
_MARGIN = 8  # tokens beside those of the stop string: the one cut at the window's start, special ones, held-back bytes
_BYTES = 4  # of a character, at the most


class Decodes(Protocol):
    """A tokenizer, as far as stop strings use it."""

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        """The text of a list of token ids."""
        ...


class StoppingCriteria:
    """Says which rows are finished. Subclass it and define `__call__` for one of your own."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """
        Args:
            input_ids: [B, L] int64, prompts and answers so far.
            scores: the scores that were kept (output_scores=True), else None.

        Returns:
            [B] bool, True where the row is finished.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__(input_ids, scores).")


class StoppingCriteriaList(list):
    """A row is finished when one of the criteria says so."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """[B] bool, as of StoppingCriteria."""
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        for criterion in self:
            done = done | criterion(input_ids, scores, **kwargs)
        return done

    @property
    def max_length(self) -> int | None:
        """The limit of the first MaxLengthCriteria in the list."""
        return next((c.max_length for c in self if isinstance(c, MaxLengthCriteria)), None)


class MaxLengthCriteria(StoppingCriteria):
    """Finished at `max_length` tokens, prompt included; one notice past the model's `max_position_embeddings`."""

    def __init__(self, max_length: int, max_position_embeddings: int | None = None) -> None:
        self.max_length, self.max_position_embeddings = max_length, max_position_embeddings

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        length = input_ids.shape[1]
        limit = self.max_position_embeddings
        if limit is not None and limit < length < self.max_length:
            notice(f"the text is longer than the model's {limit} positions; it may lose the thread.", once=True)
        return _all_rows(input_ids, length >= self.max_length)


class MaxTimeCriteria(StoppingCriteria):
    """Finished `max_time` seconds after `initial_timestamp` (of time.time(); by default, now)."""

    def __init__(self, max_time: float, initial_timestamp: float | None = None) -> None:
        self.max_time = max_time
        self.initial_timestamp = time.time() if initial_timestamp is None else initial_timestamp

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return _all_rows(input_ids, time.time() - self.initial_timestamp > self.max_time)


class EosTokenCriteria(StoppingCriteria):
    """Finished at an end-of-sequence token."""

    def __init__(self, eos_token_id: int | Sequence[int] | Tensor) -> None:
        self.eos_token_id = torch.tensor(token_ids(eos_token_id), dtype=torch.int64)

    def __call__(self, input_ids: Tensor, scores: Any, new_token_length: int = 1, **kwargs: Any) -> Tensor:
        """[B] bool: one of the last `new_token_length` tokens ends a sequence."""
        self.eos_token_id = self.eos_token_id.to(input_ids.device)
        new = input_ids[:, max(0, input_ids.shape[1] - new_token_length) :]
        return (new[..., None] == self.eos_token_id).flatten(1).any(dim=-1)


class StopStringCriteria(StoppingCriteria):
    """Finished when the last token completes a stop string, whether or not more of the token follows it.

    Reads the tokens on the host at every call. A stream of text is better served by stop_strings.StopStrings.
    """

    def __init__(self, tokenizer: Decodes, stop_strings: str | Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop_strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        if not all(self.stop_strings):
            raise ValueError(f"stop_strings={stop_strings!r} holds an empty string, which matches everywhere.")
        # A token holds at least one byte of the string.
        self._window = max(len(s.encode()) for s in self.stop_strings) + _MARGIN

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        rows = input_ids[:, -self._window :].tolist()
        return torch.tensor([self._completes(ids) for ids in rows], dtype=torch.bool, device=input_ids.device)

    def _completes(self, ids: list[int]) -> bool:
        # Where the window starts within a character, a byte-fallback decoder loses the characters after it too.
        ids = next((ids[cut:] for cut in range(_BYTES) if not self._text(ids[cut:]).startswith(_INCOMPLETE)), ids)
        text, known = self._text(ids), self._known(ids[:-1])
        return any(text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in self.stop_strings)

    def _known(self, ids: list[int]) -> int:
        """Length of the text up to the last complete character."""
        texts = (self._text(ids[: len(ids) - back]) for back in range(_BYTES))
        complete = next((t for t in texts if not t.endswith(_INCOMPLETE)), None)
        return len(self._text(ids).rstrip(_INCOMPLETE) if complete is None else complete)

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _all_rows(input_ids: Tensor, done: bool) -> Tensor:
    return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)
