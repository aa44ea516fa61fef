"""What decoders and encoders have in common: a stack of layers between tokens and hidden states."""

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.rope import RotarySet
from cuformers.nn.step import Step


class Backbone(nn.Module):
    """A model without a head. Module names are the checkpoint's own."""

    layers_at: ClassVar[str] = "layers"
    """Name of the module that holds the layers."""
    rotary: RotarySet
    max_positions: int | None = None
    """Positions that it can tell apart; None where it can go on for ever."""
    runs_on: tuple[torch.device, ...] | None = None
    """Where each layer is computed, where that is not where its weights lie."""

    @property
    def stack(self) -> nn.ModuleList:
        """The layers, in order."""
        return cast(nn.ModuleList, self.get_submodule(self.layers_at))

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer, in order."""
        raise NotImplementedError

    @property
    def embedding(self) -> nn.Embedding:
        """The embedding of tokens."""
        raise NotImplementedError

    @property
    def layer_devices(self) -> tuple[torch.device, ...]:
        """Where each layer is computed: where its weights lie, unless `runs_on` says otherwise."""
        return self.runs_on or tuple(next(layer.parameters()).device for layer in self.stack)

    def units(self) -> dict[str, nn.Module]:
        """The parts that are placed on devices as a whole, in the order they run: each layer, and what is around."""
        found: dict[str, nn.Module] = {}
        for name, part in self.named_children():
            if name == self.layers_at.partition(".")[0]:
                found |= {f"{self.layers_at}.{index}": layer for index, layer in enumerate(self.stack)}
            elif next(part.parameters(), None) is not None:
                found[name] = part
        return found

    def hidden_states(self, tokens: Tensor, step: Step, token_types: Tensor | None = None) -> Tensor:
        """Tokens [T], and their kinds [T] where the model knows some -> last hidden states [T, H]."""
        raise NotImplementedError

    def pool(self, first: Tensor) -> Tensor | None:
        """The pooler's output [N, H] for the first hidden state [N, H] of each sequence; None without a pooler."""
        del first
        return None
