"""What a loss is divided by: the labels that count in all batches of an optimizer step, each once."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

IGNORE = -100


@runtime_checkable
class Generates(Protocol):
    """A model that may predict the next token, and then shifts its labels."""

    def can_generate(self) -> bool: ...


def names(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward has an argument of that name; one that takes any may well pass over it."""
    return argument in inspect.signature(model.forward).parameters


def count_labels(batch: Any, keys: Sequence[str], *, shifted: bool) -> Tensor | None:
    """Labels of a batch that are not -100, as a number on their device; None where there are no labels.

    Args:
        keys: of labels; the first that is there counts.
        shifted: a model that predicts the next token never uses the first of a row, nor those that follow padding.
    """
    found = next((batch[key] for key in keys if isinstance(batch.get(key), Tensor)), None)
    if found is None or found.is_floating_point():
        return None
    if not shifted or found.dim() < 2:
        return found.ne(IGNORE).sum()
    counts, mask = found[..., 1:].ne(IGNORE), batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == found.shape:
        counts = counts & mask[..., :-1].ne(0)
    return counts.sum()


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model predicts the next token."""
    return isinstance(model, Generates) and bool(model.can_generate())


def shares(counts: Sequence[Tensor | None]) -> Sequence[Tensor | float]:
    """What each batch's mean loss weighs in the loss of the step: by labels where all have some, else equally."""
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return [1.0 / len(counts)] * len(counts)
    total = torch.stack(known).sum().clamp(min=1)
    return [count / total for count in known]
