"""What a model says about itself. Loaders, quantizers, parallelism and adapters act from outside on these data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuformers.checkpoint.weight_map import WeightMap
from cuformers.models.config import ModelConfig
from cuformers.nn.decoder import Decoder, HeadSpec


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One architecture."""

    config: type[ModelConfig]
    """Its configuration class, which knows `model_type` and the architecture's name."""
    decoder: Callable[[Any], Decoder]
    """Builds the decoder from the configuration."""
    head: Callable[[Any], HeadSpec]
    """What the head does to the logits."""
    weight_map: WeightMap
    """Names in the file <-> names in the module."""

    @property
    def model_type(self) -> str:
        """The name that config.json uses."""
        return self.config.model_type
