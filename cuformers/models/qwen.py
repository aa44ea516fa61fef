"""Qwen2, Qwen2.5 and Qwen3: biases on q, k, v in the former, a norm on every query and key head in the latter."""

from dataclasses import dataclass
from typing import ClassVar

from cuformers.checkpoint.weight_map import WeightMap
from cuformers.models.config import ModelConfig
from cuformers.models.config_checks import FULL, SLIDING
from cuformers.models.parts import attention_spec, plain_head
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.block import Attention
from cuformers.nn.decoder import Decoder
from cuformers.nn.layers import PreNormLayer
from cuformers.nn.mlp import GatedMLP
from cuformers.nn.norm import RMSNorm


@dataclass(kw_only=True)
class Qwen2Config(ModelConfig):
    """config.json with model_type "qwen2"."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    """Whether sliding_window is used."""
    sliding_window: int | None = 4096
    """A token sees this many tokens in sliding layers."""
    max_window_layers: int = 28
    """Layers below this index see everything."""
    layer_types: list | None = None
    """Kind of attention of each layer; None derives it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            slides, start = self.sliding_window is not None, self.max_window_layers
            self.layer_types = [SLIDING if slides and i >= start else FULL for i in range(self.num_hidden_layers)]

    @property
    def layer_kinds(self) -> list[str]:
        return self.layer_types or []


@dataclass(kw_only=True)
class Qwen3Config(Qwen2Config):
    """config.json with model_type "qwen3"."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"

    head_dim: int | None = 128


def _qwen2(config: Qwen2Config) -> Decoder:
    return _decoder(config, {"qkv_bias": True})


def _qwen3(config: Qwen3Config) -> Decoder:
    biased = config.attention_bias
    return _decoder(config, {"qkv_bias": biased, "out_bias": biased, "qk_norm": (config.rms_norm_eps, 0.0)})


def _decoder(config: Qwen2Config, attention: dict) -> Decoder:
    layers = []
    for index in range(config.num_hidden_layers):
        attn = Attention(attention_spec(config, index, window=config.sliding_window), config.hidden_size, **attention)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        layers.append(PreNormLayer(attn, mlp, config.hidden_size, config.rms_norm_eps))
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=layers,
        norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
        ropes=config.ropes,
    )


SPECS = (
    ModelSpec(config=Qwen2Config, decoder=_qwen2, head=plain_head, weight_map=WeightMap()),
    ModelSpec(config=Qwen3Config, decoder=_qwen3, head=plain_head, weight_map=WeightMap()),
)
