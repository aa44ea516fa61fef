"""Each row's penalties on the device, and what the op that applies them needs beside the logits."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cuformers.cuda.streams import upload
from cuformers.engine.capacity import Capacity
from cuformers.engine.request import Request, TokenPenalties
from cuformers.kernels.advance import DecodeState
from cuformers.kernels.penalize import Penalties, workspace

NONE = TokenPenalties()


class Penalizer:
    """The penalties of a table's rows, all off at first."""

    def __init__(self, capacity: Capacity, state: DecodeState, num_tokens: int) -> None:
        """
        Args:
            capacity: of the table.
            state: its other half, whose history and lengths are read where they are.
            num_tokens: width of the logits.
        """
        device, count = state.tokens.device, capacity.rows

        def full(value: float, dtype: torch.dtype, *more: int) -> Tensor:
            return torch.full((count, *more), value, dtype=dtype, device=device)

        self._state = state
        self.table = Penalties(
            prompt_lengths=full(0, torch.int32),
            repetition=full(NONE.repetition, torch.float32),
            frequency=full(NONE.frequency, torch.float32),
            presence=full(NONE.presence, torch.float32),
            min_new_tokens=full(NONE.min_new_tokens, torch.int32),
            eos=state.eos,
            bias_ids=full(-1, torch.int64, capacity.bias),
            bias=full(0, torch.float32, capacity.bias),
        )
        self._each_row = torch.arange(count, dtype=torch.int32, device=device)
        self._counts = workspace(count, num_tokens, device)

    def write(self, requests: Sequence[Request]) -> None:
        """Writes the penalties of requests to their rows, of those that have none too."""
        table, device = self.table, self._each_row.device
        index = upload([r.row for r in requests], torch.int64, device)
        asked = [r.penalties or NONE for r in requests]
        ids, bias = _biases(asked, table.bias.shape[1])
        columns = [
            (table.prompt_lengths, [len(r.prompt) for r in requests]),
            (table.repetition, [p.repetition for p in asked]),
            (table.frequency, [p.frequency for p in asked]),
            (table.presence, [p.presence for p in asked]),
            (table.min_new_tokens, [p.min_new_tokens for p in asked]),
            (table.bias_ids, ids),
            (table.bias, bias),
        ]
        for place, values in columns:
            place.index_copy_(0, index, upload(values, place.dtype, device))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Rows `target` [n], int64, get what rows `source` have."""
        for x in self.table:
            if x is not self._state.eos:  # which moves with the state
                x.index_copy_(0, target, x[source])

    def reset(self) -> None:
        """Empties the workspace, which a step that broke may have left full."""
        self._counts.zero_()

    def scores(self, penalize: Callable[..., Tensor], logits: Tensor, rows: Tensor | None) -> Tensor:
        """[R, V] float32 of logits [R, V] that are about to be drawn from; anything for idle rows.

        Args:
            penalize: the op.
            logits: of the step.
            rows: [R], int32, row of the table of each, -1 for none; None: each its own.
        """
        state = self._state
        if rows is None:
            rows, lengths = (x[: logits.shape[0]] for x in (self._each_row, state.lengths))
        else:
            lengths = state.positions[rows.clamp(min=0).long()] + 1
        return penalize(logits, rows, lengths, state.history, self.table, self._counts)


def _biases(asked: Sequence[TokenPenalties], width: int) -> tuple[Tensor, Tensor]:
    """(tokens, values), [n, width] each on the host, filled up with -1 and 0."""
    ids, values = torch.full((len(asked), width), -1), torch.zeros(len(asked), width)
    for row, penalties in enumerate(asked):
        count = len(penalties.bias)
        assert count <= width, f"{count} biased tokens, and the table has room for {width}"
        if count:
            tokens, numbers = zip(*penalties.bias)
            ids[row, :count], values[row, :count] = torch.tensor(tokens), torch.tensor(numbers)
    return ids, values
