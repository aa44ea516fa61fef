"""The door of a model: a padded Hugging Face batch becomes a flat stream on the way in, and gets its shape back."""

from typing import NamedTuple

import torch
from torch import Tensor


class FlatBatch(NamedTuple):
    """A padded batch [B, S] as a stream of its T real tokens."""

    tokens: Tensor
    """[T]."""
    positions: Tensor
    """[T]: position of each token in its row."""
    lengths: tuple[int, ...]
    """Real tokens of each row that has any."""
    max_position: int
    """Largest position."""
    places: Tensor | None
    """[T]: index of each token in the flattened [B * S]; None where every token is real."""
    shape: tuple[int, int]
    """(B, S)."""


def flatten(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> FlatBatch:
    """Takes the padding out of a batch: one host synchronisation, here and nowhere else.

    Args:
        input_ids: [B, S], integer.
        attention_mask: [B, S], 1 for real tokens; padding may stand left, right or between.
        position_ids: [B, S] or [1, S]; None counts from each row's first real token.

    Raises:
        ValueError: shapes that do not fit, or a mask that is no mask.
    """
    if input_ids.dim() != 2 or input_ids.dtype.is_floating_point:
        raise ValueError(f"input_ids must be integers of shape [batch, length], got {_describe(input_ids)}.")
    shape = (input_ids.shape[0], input_ids.shape[1])
    if attention_mask is not None and tuple(attention_mask.shape) != shape:
        raise ValueError(f"attention_mask must have input_ids' shape {shape}, got {_describe(attention_mask)}.")
    if position_ids is not None and (
        tuple(position_ids.shape) not in (shape, (1, shape[1])) or position_ids.dtype.is_floating_point
    ):
        allowed = f"integers of shape {shape} or {(1, shape[1])}"
        raise ValueError(f"position_ids must be {allowed}, got {_describe(position_ids)}.")
    if position_ids is not None:
        position_ids = position_ids.to(input_ids.device).expand(shape)
    count = torch.arange(shape[1], device=input_ids.device).expand(shape)
    real = None if attention_mask is None else attention_mask.to(input_ids.device) != 0
    lengths = (shape[1],) * shape[0] if real is None else tuple(real.sum(1).tolist())
    largest = shape[1] - 1 if position_ids is None else _largest(position_ids, real)
    if real is None or min(lengths, default=0) == shape[1]:
        positions = count if position_ids is None else position_ids
        kept = lengths if shape[1] else ()
        return FlatBatch(input_ids.flatten(), positions.flatten(), kept, largest, None, shape)
    positions = count - real.int().argmax(1, keepdim=True) if position_ids is None else position_ids
    places = real.flatten().nonzero()[:, 0]
    return FlatBatch(
        input_ids.flatten()[places],
        positions.flatten()[places],
        tuple(n for n in lengths if n),
        largest,
        places,
        shape,
    )


def _largest(positions: Tensor, real: Tensor | None) -> int:
    """The largest position of a real token; what stands at padding does not count."""
    if not positions.numel():
        return 0
    counted = positions if real is None else positions.masked_fill(~real, 0)
    low, high = torch.stack(counted.aminmax()).tolist()
    if low < 0:
        raise ValueError(f"position_ids must be 0 or more at real tokens, got {low}.")
    return high


def take(x: Tensor, batch: FlatBatch) -> Tensor:
    """[B, S, ...] -> [T, ...]: what stands at the real tokens."""
    stream = x.flatten(0, 1)
    return stream if batch.places is None else stream[batch.places]


def restore(stream: Tensor, batch: FlatBatch) -> Tensor:
    """[T, ...] -> [B, S, ...], zeros where padding stood."""
    if batch.places is not None:
        padded = stream.new_zeros(batch.shape[0] * batch.shape[1], *stream.shape[1:])
        stream = padded.index_copy(0, batch.places, stream)
    return stream.unflatten(0, batch.shape)


def restore_rows(rows: Tensor, batch: FlatBatch, starts: Tensor) -> Tensor:
    """[N, ...] of the rows that have tokens, the first of them at `starts` [N] -> [B, ...], zeros for the others."""
    if rows.shape[0] == batch.shape[0]:
        return rows
    whole = rows.new_zeros(batch.shape[0], *rows.shape[1:])
    return whole if batch.places is None else whole.index_copy(0, batch.places[starts] // batch.shape[1], rows)


def _describe(x: Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}"
