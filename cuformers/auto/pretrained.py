"""What every model that users hold has: its configuration, its size, and how it is saved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from cuformers.auto.adapting import Adapting
from cuformers.base.errors import bad_argument
from cuformers.checkpoint.atomic import write_json_atomic
from cuformers.checkpoint.save import save_weights
from cuformers.checkpoint.weight_map import WeightMap
from cuformers.models.base_config import BaseConfig
from cuformers.models.config_checks import check_config
from cuformers.models.spec import ModelSpec

WHOLE = "50GB"
"""Files of weights are not cut up below this size."""


class Pretrained(Adapting):
    """A model of a checkpoint or a configuration; its class is named after its architecture."""

    spec: ModelSpec
    name_or_path: str

    @property
    def together(self) -> tuple[tuple[str, ...], ...]:
        """Groups of units that lie on one device."""
        return ()

    @property
    def saved_as(self) -> WeightMap:
        """Names of the weights in the file that a save writes."""
        return self.spec.weight_map

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Number of weights, tied ones once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not only_trainable)

    def get_memory_footprint(self) -> int:
        """Bytes of the weights."""
        return sum(p.nbytes for p in self.parameters())

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of tokens."""
        return self.backbone.embedding

    def can_generate(self) -> bool:
        """Whether it has `generate`."""
        return False

    def config_to_save(self) -> Mapping[str, Any]:
        """What config.json says of the model."""
        return {**self.config.to_dict(), "dtype": str(self.dtype).removeprefix("torch.")}

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        max_shard_size: int | str = WHOLE,
        selected_adapters: Sequence[str] | None = None,
    ) -> None:
        """Writes config.json and the weights, readable by Transformers; with adapters these alone, readable by PEFT.

        Each file appears whole or not at all; a tie is written once.

        Args:
            max_shard_size: bytes of a file of weights.
            selected_adapters: only these, by name. "default" is written into the folder, others into folders of their
                names.
        """
        if self._saves_adapters(max_shard_size, selected_adapters):
            self.save_adapters(save_directory, selected_adapters)
            return
        folder = Path(save_directory)
        save_weights(self.state_dict(), folder, weight_map=self.saved_as, max_shard_size=max_shard_size)
        write_json_atomic(folder / "config.json", self.config_to_save())

    def _saves_adapters(self, max_shard_size: int | str, selected: Sequence[str] | None) -> bool:
        """Raises ValueError for what the save that it comes to can't do."""
        if self.adapters.configs and max_shard_size != WHOLE:
            raise bad_argument("max_shard_size", max_shard_size, f"{WHOLE!r} with adapters, which are one file each")
        if selected is not None and not self.adapters.configs:
            raise bad_argument("selected_adapters", selected, "None for a model without adapters")
        return bool(self.adapters.configs)


M = TypeVar("M", bound=Pretrained)


def named(kind: type[M], architecture: str) -> type[M]:
    """The same class under an architecture's name, as Transformers' users look for it."""
    return cast("type[M]", type(architecture, (kind,), {"__doc__": kind.__doc__, "__module__": kind.__module__}))


def check_buildable(config: BaseConfig) -> None:
    """Raises ValueError where the configuration is not one of ours, or was changed to values that can be no model."""
    if not isinstance(config, BaseConfig):
        raise bad_argument("config", type(config), "what cuformers' AutoConfig makes", "Use cuformers.AutoConfig.")
    check_config(config)
