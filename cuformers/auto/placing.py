"""Where a model goes: from `device_map` to a device for each parameter."""

from typing import Any, NamedTuple

import torch

from cuformers.auto.model import PreTrainedModel
from cuformers.base.log import notice
from cuformers.cuda.device import default_device, device_name, resolve_device


class Placed(NamedTuple):
    device: torch.device

    def device_of(self, name: str) -> torch.device:
        return self.device


def place(model: PreTrainedModel, device_map: Any, max_memory: Any, dtype: torch.dtype) -> Placed:
    if device_map is None or device_map == "auto":
        device = default_device()
        if device_map is None:
            notice(f"the model goes to {device} ({device_name(device)}); device_map= chooses another place.", once=True)
        return Placed(device)
    return Placed(resolve_device(device_map))
