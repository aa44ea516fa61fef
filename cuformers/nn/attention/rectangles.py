"""Sequences of different lengths as a few rectangles, for kernels that take nothing else: like lengths together."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.attention.eager import attention_mask

FILL = 0.75
"""Least length of a sequence in a rectangle, as a share of the longest one's."""
LARGEST = 1 << 26
"""Most elements of a rectangle's mask."""


class Rectangle(NamedTuple):
    """Some sequences of a stream, each padded on its right to the longest of them."""

    length: int
    """Of the longest, S."""
    tokens: Tensor
    """[T']: their places in the stream."""
    cells: Tensor
    """[T']: their places in the flattened [N, S]."""
    real: Tensor
    """[N, S], bool: where a token is."""

    def filled(self, stream: Tensor) -> Tensor:
        """[T, ...] -> [N, S, ...], zeros where padding is."""
        flat = stream.new_zeros(self.real.numel(), *stream.shape[1:])
        return flat.index_copy(0, self.cells, stream[self.tokens]).unflatten(0, self.real.shape)

    def mask(self, spec: AttentionSpec) -> Tensor | None:
        """[N, 1, 1 or S, S], bool: what each query sees; None where a causal mask is enough, as padding comes last.

        Queries of padding see everything, as a softmax over nothing would be NaN.
        """
        windowed = spec.window is not None and spec.window < self.length
        if not windowed:
            return None if spec.causal else self.real[:, None, None, :]
        seen = self.real[:, None, :] & attention_mask(self.length, spec, self.real.device)
        return (seen | ~self.real[:, :, None])[:, None]


@lru_cache(maxsize=4)
@torch.inference_mode(False)  # kept tensors may be asked for a gradient's sake later
def rectangles(lengths: tuple[int, ...], device: torch.device) -> tuple[Rectangle, ...]:
    """All sequences of a stream, in as few rectangles as `FILL` and `LARGEST` allow; layers of a step share them."""
    size = torch.tensor(lengths)
    begin = size.cumsum(0) - size
    found = []
    for members in _members(lengths):
        index = torch.tensor(members)
        real = torch.arange(lengths[members[0]]) < size[index][:, None]
        tokens = (begin[index][:, None] + torch.arange(real.shape[1]))[real]
        cells = real.flatten().nonzero()[:, 0]
        found.append(Rectangle(real.shape[1], tokens.to(device), cells.to(device), real.to(device)))
    return tuple(found)


def _members(lengths: tuple[int, ...]) -> list[list[int]]:
    """Sequences that share a rectangle, the longest first."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or lengths[index] < FILL * longest or (len(groups[-1]) + 1) * longest**2 > LARGEST:
            groups.append([])
        groups[-1].append(index)
    return groups
