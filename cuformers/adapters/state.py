"""Which adapters a model has, and which of them count now: said once, for all its layers."""

from dataclasses import dataclass, field

from torch import Tensor

from cuformers.adapters.config import LoraConfig


@dataclass
class AdapterState:
    """All layers of a model hold the same one, so that they can't disagree."""

    configs: dict[str, LoraConfig] = field(default_factory=dict)
    """Each adapter's, by name."""
    active: tuple[str, ...] = ()
    """Adapters that count, unless they are disabled; what they add is added up."""
    enabled: bool = True
    merged: tuple[str, ...] = ()
    """Adapters that are part of the weights at present."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """The weights without them, by module, on the CPU."""
    version: int = 0
    """Grows with every change of what the model computes."""

    @property
    def adding(self) -> tuple[str, ...]:
        """Adapters whose products are computed beside the weights'."""
        return self.active if self.enabled and not self.merged else ()
