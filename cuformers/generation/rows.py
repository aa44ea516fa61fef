"""Rows: the token history that logits processors look at, rectangular or of rows with lengths of their own."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Tail(NamedTuple):
    """The last tokens of each row."""

    ids: Tensor
    """[B, n]; the row's last token is at the right. -1 where the row is shorter."""
    present: Tensor
    """[B, n] bool, False where the row is shorter."""


@dataclass(frozen=True)
class Rows:
    """Prompt and answer of each row so far. Nothing here asks the device for a value.

    Rectangular (`lengths` None): every column is history, as in Transformers, padding included.
    Ragged: row i is `ids[i, :lengths[i]]`, whatever follows is ignored.
    """

    ids: Tensor
    """[B, L] int64 or int32 token ids."""
    lengths: Tensor | None = None
    """[B] int64 or int32 tokens of each row, prompt included."""
    prompt_lengths: Tensor | None = None
    """[B] int64 or int32 tokens of each row's prompt; None: processors use the prompt length they were made with."""

    @property
    def length(self) -> Tensor | int:
        """Tokens of each row: an int where all are alike, else [B, 1]."""
        return self.ids.shape[1] if self.lengths is None else self.lengths[:, None]

    def generated(self, prompt_length: int) -> Tensor | int:
        """Tokens after the prompt: an int where all rows are alike, else [B, 1]."""
        return self.length - (prompt_length if self.prompt_lengths is None else self.prompt_lengths[:, None])

    def counted(self, start: int | None = None) -> Tensor | None:
        """[B, L] or [1, L] bool: columns of history from `start` on (None: from the end of each row's prompt).

        None where all columns count.
        """
        columns = torch.arange(self.ids.shape[1], device=self.ids.device)[None]
        mask = None if self.lengths is None else columns < self.lengths[:, None]
        if start is None:
            assert self.prompt_lengths is not None, "rows have no prompt_lengths"
            after = columns >= self.prompt_lengths[:, None]
        elif start == 0:
            return mask
        else:
            after = columns >= start
        return after if mask is None else mask & after

    def tail(self, count: int) -> Tail:
        """The last `count` tokens of each row."""
        width = self.ids.shape[1]
        if count == 0 or width == 0:
            empty = self.ids.new_full((self.ids.shape[0], count), -1)
            return Tail(empty, torch.zeros_like(empty, dtype=torch.bool))
        end = self.ids.new_full((1, 1), width) if self.lengths is None else self.lengths[:, None]
        columns = end - count + torch.arange(count, device=self.ids.device)
        columns = columns.expand(self.ids.shape[0], count)
        present = columns >= 0
        return Tail(torch.where(present, self.ids.gather(1, columns.clamp(min=0).long()), -1), present)
