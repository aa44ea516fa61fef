"""The rows that decode works on: what each running request feeds to the next step, kept on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.engine.capacity import Capacity
from cuformers.engine.request import Request
from cuformers.kernels.advance import DecodeState


class SamplingState(NamedTuple):
    """How each row draws its next token."""

    temperature: Tensor
    """[B], float32; 0 takes the largest logit."""
    top_k: Tensor
    """[B], int32; 0 is off."""
    top_p: Tensor
    """[B], float32; 1 is off."""
    min_p: Tensor
    """[B], float32; 0 is off."""
    seeds: Tensor
    """[B], int64."""

    def rows(self, start: int, stop: int) -> "SamplingState":
        """The state of some rows, as views."""
        return SamplingState(*(x[start:stop] for x in self))


class Rows(NamedTuple):
    """Both halves of a row."""

    decode: DecodeState
    sampling: SamplingState

    def cut(self, start: int, stop: int) -> "Rows":
        """Some rows, as views."""
        return Rows(self.decode.rows(start, stop), self.sampling.rows(start, stop))


def idle_rows(capacity: Capacity, page_size: int, device: torch.device) -> Rows:
    """Rows that wait for requests."""
    count = capacity.slots

    def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    decode = DecodeState(
        tokens=full((count,), 0, torch.int64),
        positions=full((count,), 0, torch.int32),
        lengths=full((count,), 0, torch.int32),
        slots=full((count,), -1, torch.int32),
        limits=full((count,), 0, torch.int32),
        block_tables=full((count, -(-capacity.length // page_size)), 0, torch.int32),
        history=full((count, capacity.length), 0, torch.int32),
        eos=full((count, capacity.eos), -1, torch.int64),
        page_size=page_size,
    )
    sampling = SamplingState(
        temperature=full((count,), 0, torch.float32),
        top_k=full((count,), 0, torch.int32),
        top_p=full((count,), 1, torch.float32),
        min_p=full((count,), 0, torch.float32),
        seeds=full((count,), 0, torch.int64),
    )
    return Rows(decode, sampling)


def fresh_rows(requests: Sequence[Request], capacity: Capacity, page_size: int, device: torch.device) -> Rows:
    """Rows of requests that are about to be computed from their tokens; the next token follows the last of these."""
    contexts = [r.context for r in requests]
    lengths = [len(c) for c in contexts]
    width, pages = max(lengths) + 1, max(len(r.pages) for r in requests)

    def ints(values: Sequence, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    def floats(values: Sequence[float]) -> Tensor:
        return ints(values, torch.float32)

    decode = DecodeState(
        tokens=ints([c[-1] for c in contexts], torch.int64),
        positions=ints([n - 1 for n in lengths]),
        lengths=ints(lengths),
        slots=ints([-1] * len(requests)),
        limits=ints([r.limit for r in requests]),
        block_tables=ints([r.pages + [0] * (pages - len(r.pages)) for r in requests]),
        history=ints([c + [0] * (width - len(c)) for c in contexts]),
        eos=ints([list(r.eos) + [-1] * (capacity.eos - len(r.eos)) for r in requests], torch.int64),
        page_size=page_size,
    )
    ways = [r.sampling for r in requests]
    sampling = SamplingState(
        temperature=floats([s.temperature for s in ways]),
        top_k=ints([s.top_k for s in ways]),
        top_p=floats([s.top_p for s in ways]),
        min_p=floats([s.min_p for s in ways]),
        seeds=ints([s.seed for s in ways], torch.int64),
    )
    return Rows(decode, sampling)


def put_rows(rows: Rows, fresh: Rows, slots: Sequence[int]) -> None:
    """Writes fresh rows to their places."""
    index = torch.tensor(slots).to(rows.decode.tokens.device, non_blocking=True)
    pairs = [*zip(rows.decode[:-1], fresh.decode[:-1]), *zip(rows.sampling, fresh.sampling)]
    for place, value in pairs:
        if place.dim() == 2:
            place = place[:, : value.shape[1]]
        place.index_copy_(0, index, value)


def right_aligned_history(state: DecodeState, length: int, pad: int) -> Tensor:
    """[B, length], int64: each row's tokens so far, filled up with `pad` on the left, as Transformers pads prompts.

    Args:
        state: the rows.
        length: tokens of the longest row.
        pad: fills up the others.
    """
    index = torch.arange(length, device=state.history.device) - (length - 1 - state.positions[:, None])
    tokens = state.history.gather(1, index.clamp(min=0).long())
    return tokens.long().masked_fill(index < 0, pad)
