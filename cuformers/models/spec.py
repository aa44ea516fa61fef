"""What a model says about itself. Loaders, quantizers, parallelism and adapters act from outside on these data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuformers.checkpoint.weight_map import WeightMap
from cuformers.models.base_config import BaseConfig
from cuformers.nn.backbone import Backbone
from cuformers.nn.decoder import Decoder, HeadSpec


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One architecture: a decoder with its head, or an encoder."""

    config: type[BaseConfig]
    """Its configuration class, which knows `model_type` and the architecture's name."""
    decoder: Callable[[Any], Decoder] | None = None
    """Builds the decoder from the configuration."""
    head: Callable[[Any], HeadSpec] | None = None
    """What the head does to the logits; a decoder has one."""
    encoder: Callable[[Any], Backbone] | None = None
    """Builds the encoder from the configuration."""
    weight_map: WeightMap
    """Names in the file <-> names in the module, both of the model with its head: with `prefix`."""
    prefix: str = "model."
    """Begins the names of the model without a head in the files of one with a head."""
    optional: tuple[str, ...] = ()
    """Modules that a checkpoint may lack; the model is then built without them."""

    def __post_init__(self) -> None:
        decodes, heads, encodes = (part is not None for part in (self.decoder, self.head, self.encoder))
        assert decodes == heads != encodes, f"{self.model_type}: a decoder and its head, or an encoder"

    @property
    def model_type(self) -> str:
        """The name that config.json uses."""
        return self.config.model_type

    @property
    def home(self) -> str:
        """Begins the names of the modules of the model without a head in one with a head."""
        return "model." if self.decoder is not None else self.prefix

    def backbone(self, config: Any) -> Backbone:
        """The model without a head."""
        build = self.decoder or self.encoder
        assert build is not None
        return build(config)
