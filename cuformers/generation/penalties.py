"""Penalties on tokens that occurred: pure functions on scores [B, V] fp32 and Rows, no value leaves the device.

A penalty may be a number, or a tensor [B] with one for each row.
"""

import torch
from torch import Tensor

from cuformers.generation.rows import Rows
from cuformers.generation.warpers import Param, column


def repetition(scores: Tensor, rows: Rows, penalty: Param, *, start: int = 0) -> Tensor:
    """Divides positive and multiplies negative scores of tokens seen in prompt or answer (Keskar 2019).

    Args:
        start: tokens at the beginning of each row that do not count as seen.
    """
    seen = occurred(scores, rows, start)
    value = column(penalty)
    if not isinstance(value, Tensor):
        # A GPU divides by a Python number as a product with its rounded inverse: the op `penalize` rounds once.
        value = torch.full((), value, dtype=scores.dtype, device=scores.device)
    return torch.where(seen, torch.where(scores < 0, scores * value, scores / value), scores)


def presence(scores: Tensor, rows: Rows, penalty: Param, *, start: int | None = None) -> Tensor:
    """Subtracts the penalty from tokens that occurred at or after `start` (None: after each row's prompt)."""
    return torch.where(occurred(scores, rows, start), scores - column(penalty), scores)


def frequency(scores: Tensor, rows: Rows, penalty: Param, *, start: int | None = None) -> Tensor:
    """Subtracts the penalty once for each time the token occurred at or after `start`."""
    counted = rows.counted(start)
    ones = torch.ones_like(rows.ids, dtype=scores.dtype)
    if counted is not None:
        ones = ones * counted
    # Ignored columns may hold anything: they add 0 to token 0.
    ids = (rows.ids if counted is None else torch.where(counted, rows.ids, 0)).long()
    return scores - column(penalty) * torch.zeros_like(scores).scatter_add(1, ids, ones)


def occurred(scores: Tensor, rows: Rows, start: int | None) -> Tensor:
    """[B, V] bool: the token is in the row's history from column `start` on (None: after its prompt)."""
    counted = rows.counted(start)
    return mark(scores, rows.ids, counted)


def mark(scores: Tensor, ids: Tensor, valid: Tensor | None) -> Tensor:
    """[B, V] bool: True at ids [B, n] where valid [B, n] (None: everywhere)."""
    vocab = scores.shape[-1]
    # Ids that do not count go to a spare column, where they can't unmark anything.
    ids = ids if valid is None else torch.where(valid, ids, vocab)
    marks = torch.zeros((scores.shape[0], vocab + 1), dtype=torch.bool, device=scores.device)
    return marks.scatter_(1, ids.long(), True)[:, :vocab]
