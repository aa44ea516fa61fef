"""Where steps leave their tokens for the host, which reads them a few steps later."""

import torch
from torch import Tensor

from cuformers.cuda import streams
from cuformers.kernels.table import Kernels

SLOTS = 8
"""Steps whose tokens are kept: more than the engine leaves unread."""


class Postbox:
    """Slots that are used in turn. The device counts the turns itself, as captured steps can't be told; the host counts
    along."""

    def __init__(self, width: int, device: torch.device) -> None:
        """`width`: tokens of a slot."""
        self._slots = streams.pinned_empty((SLOTS, width), torch.int64)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._taken = 0

    def post(self, ops: Kernels, tokens: Tensor) -> None:
        """Writes tokens to the next slot, as a part of a step."""
        ops.post(tokens.flatten(), self._slots, self._turn)

    def take(self, shape: torch.Size) -> Tensor:
        """Where the step that was just launched has its tokens, of this shape; there once the step is done."""
        slot = self._slots[self._taken % SLOTS, : shape.numel()]
        self._taken += 1
        return slot.view(shape)

    def start_again(self) -> None:
        """Counts anew on both sides, after an error between a launch and its `take`."""
        self._turn.zero_()
        self._taken = 0
