"""The table of running requests on the device, a row each: what the next step reads, so that it needs no host."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.cuda.streams import upload
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

    def picked(self, index: Tensor) -> "SamplingState":
        """A copy of the state of the rows at `index` [n], int64."""
        return SamplingState(*(x[index] for x in self))


class Rows(NamedTuple):
    """Both halves of a row."""

    decode: DecodeState
    sampling: SamplingState

    def cut(self, start: int, stop: int) -> "Rows":
        """Some rows, as views."""
        return Rows(self.decode.rows(start, stop), self.sampling.rows(start, stop))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Rows `target` [n], int64, become what rows `source` were, which become idle."""
        self.decode.move(source, target)
        for x in self.sampling:
            x.index_copy_(0, target, x[source])


def idle_rows(capacity: Capacity, groups: int, page_size: int, device: torch.device) -> Rows:
    """Rows that wait for requests."""
    count = capacity.rows

    def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    decode = DecodeState(
        tokens=full((count,), 0, torch.int64),
        positions=full((count,), 0, torch.int32),
        lengths=full((count,), 0, torch.int32),
        slots=full((groups, count), -1, torch.int32),
        limits=full((count,), 0, torch.int32),
        block_tables=full((groups, count, -(-capacity.length // page_size)), 0, torch.int32),
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


def write_rows(rows: Rows, requests: Sequence[Request]) -> None:
    """Writes requests to the rows that they were given: idle until the last chunk of their prompt has been computed."""
    device, state = rows.decode.tokens.device, rows.decode
    index = upload([r.row for r in requests], torch.int64, device)

    def put(place: Tensor, values: list, dim: int = 0) -> None:
        place.index_copy_(dim, index, upload(values, place.dtype, device))

    contexts = [r.context for r in requests]
    put(state.positions, [len(c) - 1 for c in contexts])
    put(state.limits, [r.limit for r in requests])
    width = state.eos.shape[1]
    put(state.eos, [list(r.eos) + [-1] * (width - len(r.eos)) for r in requests])
    state.idle(index)
    ways = [r.sampling for r in requests]
    for name, place in rows.sampling._asdict().items():
        put(place, [getattr(way, "seed" if name == "seeds" else name) for way in ways])
    _write_histories(state.history, requests, contexts)
    write_tables(state.block_tables, [
        (group, r.row, i, page)
        for r in requests for group, table in enumerate(r.tables) for i, page in enumerate(table) if page is not None
    ])  # fmt: skip


def _write_histories(history: Tensor, requests: Sequence[Request], contexts: list[list[int]]) -> None:
    width = history.shape[1]
    places = torch.cat([torch.arange(len(c)) + r.row * width for r, c in zip(requests, contexts)])
    tokens = upload([token for c in contexts for token in c], torch.int32, history.device)
    history.view(-1).index_copy_(0, upload(places, torch.int64, history.device), tokens)


def write_tables(block_tables: Tensor, entries: Sequence[tuple[int, int, int, int]]) -> None:
    """Writes (group, row, index, page) entries to the block tables [G, B, M]."""
    if not entries:
        return
    group_size, row_size = block_tables.stride(0), block_tables.stride(1)
    packed = torch.tensor(entries)
    places = packed[:, 0] * group_size + packed[:, 1] * row_size + packed[:, 2]
    moved = upload(torch.stack((places, packed[:, 3])), torch.int64, block_tables.device)
    block_tables.view(-1).index_copy_(0, moved[0], moved[1].int())


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
