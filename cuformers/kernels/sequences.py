"""A flat stream of several sequences as one row a sequence, for specifications; reads lengths on the host."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def to_rows(stream: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T, ...] -> [N, longest, ...], zeros after a sequence's end."""
    pieces = stream.split(cu_seqlens.diff().tolist())
    return pad_sequence(list(pieces), batch_first=True) if pieces else stream[None, :0][:0]


def to_stream(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N, longest, ...] -> [T, ...]."""
    pieces = [row[:n] for row, n in zip(rows, cu_seqlens.diff().tolist())]
    return torch.cat(pieces) if pieces else rows.flatten(0, 1)
