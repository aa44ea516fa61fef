"""A model whose layers lie on several GPUs: the stream of hidden states follows the weights."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cuformers.kernels.attention_plan import AttentionPlan
from cuformers.nn.step import CacheView, Chunks, RopeRows, Step


class Spread:
    """Moves what a layer is given to the device where the layer runs; lives as long as the hooks that it sets."""

    def __init__(self, layers: Sequence[nn.Module], devices: Sequence[torch.device], home: torch.device) -> None:
        self._last: tuple[Step, torch.device, Step] | None = None
        self._tables: dict[tuple[int, torch.device], Tensor] = {}
        for layer, device in zip(layers, devices):
            layer.register_forward_pre_hook(partial(self._enter, device))
        layers[-1].register_forward_hook(lambda module, args, output: output.to(home, non_blocking=True))

    def _enter(self, device: torch.device, layer: nn.Module, args: tuple[Tensor, Step]) -> tuple[Tensor, Step]:
        x, step = args
        if step.positions.device == device:
            return x.to(device, non_blocking=True), step
        if self._last is None or self._last[0] is not step or self._last[1] != device:
            self._last = (step, device, self._moved(step, device))
        return x.to(device, non_blocking=True), self._last[2]

    def _moved(self, step: Step, device: torch.device) -> Step:
        values = {f.name: self._value(getattr(step, f.name), device) for f in fields(step)}
        return replace(step, **values)

    def _value(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, RopeRows):
            return RopeRows(self._table(value.cos, device), self._table(value.sin, device), value.rows.to(device))
        if isinstance(value, CacheView | Chunks | AttentionPlan):
            return type(value)(*(self._value(part, device) for part in value))
        if isinstance(value, Mapping):
            return {name: self._value(inner, device) for name, inner in value.items()}
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    def _table(self, table: Tensor, device: torch.device) -> Tensor:
        """Rotary tables are large and the same at every step: each is moved once."""
        key = (table.data_ptr(), device)
        if key not in self._tables or self._tables[key].shape != table.shape:
            self._tables[key] = table.to(device)
        return self._tables[key]
