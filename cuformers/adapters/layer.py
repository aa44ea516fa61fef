"""A linear map with adapters."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuformers.adapters.config import LoraConfig
from cuformers.adapters.state import AdapterState
from cuformers.adapters.targets import Target
from cuformers.nn.added import AddedLinear


class LoraLinear(AddedLinear):
    """weight and bias of an `nn.Linear`, and A [r, in] and B [out, r] of each adapter as lora_A.NAME and lora_B.NAME.

    The products with A and B are computed in x's dtype, whatever dtype A and B are kept in.
    """

    def __init__(self, base: nn.Linear, state: AdapterState) -> None:
        super().__init__(base)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.scaling: dict[str, float] = {}
        self.dropout: dict[str, float] = {}
        self.state = state

    def add(self, name: str, target: Target, config: LoraConfig, dtype: torch.dtype) -> None:
        """Makes an adapter's A and B, initialised as the config says."""
        where = {"dtype": dtype, "device": self.weight.device}
        a = torch.empty(target.rank, self.in_features, **where)
        b = torch.zeros(self.out_features, target.rank, **where)
        if config.init_lora_weights == "gaussian":
            nn.init.normal_(a, std=1 / target.rank)
        else:
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        if config.init_lora_weights is False:
            nn.init.kaiming_uniform_(b, a=math.sqrt(5))
        self.lora_A[name], self.lora_B[name] = nn.Parameter(a), nn.Parameter(b)
        self.scaling[name], self.dropout[name] = target.scaling, config.lora_dropout

    def remove(self, name: str) -> None:
        """Forgets an adapter."""
        for kept in (self.lora_A, self.lora_B, self.scaling, self.dropout):
            del kept[name]

    @property
    def adding(self) -> tuple[tuple[str, float], ...]:
        return tuple((name, self.scaling[name]) for name in self.state.adding if name in self.scaling)

    def added(self, x: Tensor) -> Tensor:
        parts = [self._one(name, scaling, x) for name, scaling in self.adding]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def add_to(self, y: Tensor, x: Tensor, scale: float) -> None:
        for name, scaling in self.adding:
            inner = self._inner(name, x).to(y.dtype)
            y.addmm_(inner, self.lora_B[name].to(y.dtype).t(), alpha=scale * scaling)  # one launch, rounded once

    def _one(self, name: str, scaling: float, x: Tensor) -> Tensor:
        return F.linear(self._inner(name, x) * scaling, self.lora_B[name].to(x.dtype))

    def _inner(self, name: str, x: Tensor) -> Tensor:
        """A dropout(x): [..., r]."""
        if self.training and self.dropout[name]:
            x = F.dropout(x, self.dropout[name])
        return F.linear(x, self.lora_A[name].to(x.dtype))

    def delta(self, name: str) -> Tensor:
        """scaling * B A [out, in], float32 (float64 for a float64 adapter)."""
        a, b = self.lora_A[name], self.lora_B[name]
        wide = torch.promote_types(a.dtype, torch.float32)
        return (b.to(wide) @ a.to(wide)) * self.scaling[name]

    def plain(self) -> nn.Linear:
        """The linear map without adapters; weight and bias are the same parameters."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The adapted linear maps of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
