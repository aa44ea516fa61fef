"""Mamba, Falcon-Mamba and Mamba-2: decoders whose layers carry a state instead of attending."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cuformers.base.errors import bad_argument
from cuformers.checkpoint.weight_map import Rename, WeightMap
from cuformers.models.spec import ModelSpec
from cuformers.models.state_space_config import StateSpaceConfig
from cuformers.nn.decoder import HeadSpec
from cuformers.nn.norm import RMSNorm
from cuformers.nn.state_space.decoder import MixerLayer, StateSpaceDecoder
from cuformers.nn.state_space.mamba import MambaMixer
from cuformers.nn.state_space.mamba2 import Mamba2Mixer

NAMES = WeightMap(
    (
        Rename("backbone.embeddings.weight", "model.embed_tokens.weight"),
        Rename("backbone.norm_f.weight", "model.norm.weight"),
        Rename("backbone.{*rest}", "model.{*rest}"),
    ),
    older={".embedding.weight": ".embeddings.weight"},
)


@dataclass(kw_only=True)
class MambaConfig(StateSpaceConfig):
    """config.json with model_type "mamba"."""

    model_type: ClassVar[str] = "mamba"
    architecture: ClassVar[str] = "MambaForCausalLM"

    vocab_size: int = 50280
    tie_word_embeddings: bool = True


@dataclass(kw_only=True)
class FalconMambaConfig(MambaConfig):
    """config.json with model_type "falcon_mamba": Mamba with norms of the step, B and C."""

    model_type: ClassVar[str] = "falcon_mamba"
    architecture: ClassVar[str] = "FalconMambaForCausalLM"

    mixer_rms_eps: float = 1e-6
    """Added to the mean square of those before the root."""


@dataclass(kw_only=True)
class Mamba2Config(StateSpaceConfig):
    """config.json with model_type "mamba2"."""

    model_type: ClassVar[str] = "mamba2"
    architecture: ClassVar[str] = "Mamba2ForCausalLM"

    hidden_size: int = 4096
    num_hidden_layers: int = 64
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    num_heads: int = 128
    """Heads of a mixer."""
    head_dim: int = 64
    """Channels of a head."""
    state_size: int = 128
    n_groups: int = 8
    """Sets of B and C, each for as many heads."""
    time_step_limit: list | tuple = field(default_factory=lambda: [0.0, math.inf])
    """Least and greatest step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = self.intermediate_size
        if inner != self.num_heads * self.head_dim:
            product = f"num_heads * head_dim = {self.num_heads * self.head_dim}"
            raise bad_argument("expand * hidden_size", inner, product, "Check config.json.")
        if self.num_heads % self.n_groups:
            raise bad_argument("config.n_groups", self.n_groups, f"a divisor of num_heads={self.num_heads}")
        self.time_step_limit = limit = [_read_number(v) for v in self.time_step_limit]
        if len(limit) != 2 or not 0 <= limit[0] <= limit[1]:
            raise bad_argument("config.time_step_limit", limit, "the least step, from 0 on, and the greatest")

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "time_step_limit": [_written_number(v) for v in self.time_step_limit]}


def _read_number(value: Any) -> float:
    """A number of a file; JSON has none for what is infinite, and Transformers writes {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _written_number(value: float) -> Any:
    return {"__float__": "Infinity"} if value == math.inf else value


def _mamba(config: MambaConfig, steps_eps: float | None = None) -> StateSpaceDecoder:
    assert isinstance(config.time_step_rank, int)
    sizes = (config.hidden_size, config.intermediate_size, config.state_size, config.time_step_rank)
    return _decoder(config, [MambaMixer(*sizes, **_common(config), steps_eps=steps_eps) for _ in _layers(config)])


def _falcon_mamba(config: FalconMambaConfig) -> StateSpaceDecoder:
    return _mamba(config, config.mixer_rms_eps)


def _mamba2(config: Mamba2Config) -> StateSpaceDecoder:
    sizes = (config.hidden_size, config.num_heads, config.head_dim, config.n_groups, config.state_size)
    low, high = config.time_step_limit
    options: dict[str, Any] = {"eps": config.layer_norm_epsilon, "dt_limit": (low, high), **_common(config)}
    return _decoder(config, [Mamba2Mixer(*sizes, **options) for _ in _layers(config)])


def _layers(config: StateSpaceConfig) -> range:
    return range(config.num_hidden_layers)


def _common(config: StateSpaceConfig) -> dict[str, Any]:
    return {"kernel": config.conv_kernel, "conv_bias": config.use_conv_bias, "bias": config.use_bias}


def _decoder(config: StateSpaceConfig, mixers: list[Any]) -> StateSpaceDecoder:
    eps = config.layer_norm_epsilon
    return StateSpaceDecoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=[MixerLayer(mixer, config.hidden_size, eps) for mixer in mixers],
        norm=RMSNorm(config.hidden_size, eps),
        residual_in_fp32=config.residual_in_fp32,
    )


def _head(config: StateSpaceConfig) -> HeadSpec:
    return HeadSpec(tied=config.tie_word_embeddings)


def _spec(config: type[StateSpaceConfig], decoder: Any) -> ModelSpec:
    return ModelSpec(config=config, decoder=decoder, head=_head, weight_map=NAMES, prefix="backbone.")


SPECS = (_spec(MambaConfig, _mamba), _spec(FalconMambaConfig, _falcon_mamba), _spec(Mamba2Config, _mamba2))
