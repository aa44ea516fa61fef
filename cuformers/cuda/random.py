"""The state of the GPUs' random generators."""

import torch
from torch import Tensor


def rng_states() -> list[Tensor]:
    """The state of each visible GPU's generator; none where there is no GPU."""
    return list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else []


def set_rng_states(states: list[Tensor]) -> None:
    """Takes what `rng_states` gave, as far as there are GPUs."""
    if torch.cuda.is_available():
        for index, state in enumerate(states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
