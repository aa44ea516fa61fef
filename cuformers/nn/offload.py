"""Layers whose weights stay in the CPU's memory and travel to the GPU when they are computed.

A layer's weights are copied on a side stream while the layer before it is computed, so that copying and computing
overlap; the speed is that of the link. Storage that parameters share is copied once and shared again.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cuformers.cuda import streams


class _Copy(NamedTuple):
    """One layer's weights on their way to the GPU."""

    tensors: dict[str, Tensor]
    ready: streams.Event


class Offload:
    """Streams some layers of a model to a device; lives as long as the hooks that it sets on them."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self.layers, self.device = list(layers), device
        self.stream = streams.side_stream(device)
        self._copies: dict[int, _Copy] = {}
        self._homes: list[dict[str, Tensor]] = []
        for index, layer in enumerate(self.layers):
            _pin(layer)
            self._homes.append({name: p.data for name, p in layer.named_parameters()})
            layer.register_forward_pre_hook(partial(self._enter, index))
            layer.register_forward_hook(partial(self._leave, index))

    def _enter(self, index: int, layer: nn.Module, args: object) -> None:
        copy = self._copies.pop(index, None) or self._start(index)
        following = (index + 1) % len(self.layers)
        if following != index and following not in self._copies:
            self._copies[following] = self._start(following)
        here = streams.current(self.device)
        streams.wait(here, copy.ready)
        for name, parameter in layer.named_parameters():
            streams.keep_until_done(copy.tensors[name], here)
            parameter.data = copy.tensors[name]

    def _leave(self, index: int, layer: nn.Module, args: object, output: object) -> None:
        for name, parameter in layer.named_parameters():
            parameter.data = self._homes[index][name]

    def _start(self, index: int) -> _Copy:
        """Begins the copy of a layer."""
        wholes: dict[int, Tensor] = {}
        tensors = {}
        with streams.use(self.stream):
            for name, home in self._homes[index].items():
                storage = home.untyped_storage()
                if storage.data_ptr() not in wholes:
                    flat = torch.empty(0, dtype=home.dtype).set_(storage)  # type: ignore[call-overload]
                    wholes[storage.data_ptr()] = flat.to(self.device, non_blocking=True)
                whole = wholes[storage.data_ptr()]
                tensors[name] = whole.as_strided(home.shape, home.stride(), home.storage_offset())
        return _Copy(tensors, streams.record(self.stream))


def _pin(layer: nn.Module) -> None:
    """Moves a layer's weights to page-locked memory, each shared storage once."""
    wholes: dict[int, Tensor] = {}
    for parameter in layer.parameters():
        home = parameter.data
        storage = home.untyped_storage()
        if storage.data_ptr() not in wholes:
            flat = torch.empty(0, dtype=home.dtype).set_(storage)  # type: ignore[call-overload]
            wholes[storage.data_ptr()] = streams.pinned_empty(flat.shape, flat.dtype).copy_(flat)
        parameter.data = wholes[storage.data_ptr()].as_strided(home.shape, home.stride(), home.storage_offset())
