"""post in plain PyTorch: the specification. It waits for the values."""

from torch import Tensor


def post(values: Tensor, slots: Tensor, turn: Tensor) -> None:
    """Copies the values to the slot whose turn it is."""
    slots[int(turn) % slots.shape[0], : values.shape[0]] = values.to(slots.device)
    turn += 1
