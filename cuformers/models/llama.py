"""Llama 2, 3, 3.1 and 3.2, and the families that are Llama but for a few lines: Mistral, SmolLM3, Granite."""

from dataclasses import dataclass
from typing import ClassVar

from cuformers.checkpoint.weight_map import WeightMap
from cuformers.models.config import ModelConfig
from cuformers.models.config_checks import FULL, SLIDING
from cuformers.models.parts import attention_spec, plain_head
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.block import Attention
from cuformers.nn.decoder import Decoder, HeadSpec
from cuformers.nn.layers import PreNormLayer
from cuformers.nn.mlp import GatedMLP
from cuformers.nn.norm import RMSNorm


@dataclass(kw_only=True)
class LlamaConfig(ModelConfig):
    """config.json with model_type "llama"."""

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"

    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    mlp_bias: bool = False
    """Biases in the feed-forward blocks."""


@dataclass(kw_only=True)
class MistralConfig(ModelConfig):
    """config.json with model_type "mistral": every layer has the same window."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    sliding_window: int | None = 4096
    """A token sees this many tokens, itself included; None means all before it."""

    @property
    def layer_kinds(self) -> list[str]:
        return [FULL if self.sliding_window is None else SLIDING] * self.num_hidden_layers


@dataclass(kw_only=True)
class SmolLM3Config(ModelConfig):
    """config.json with model_type "smollm3": every fourth layer has no rotary embedding."""

    model_type: ClassVar[str] = "smollm3"
    architecture: ClassVar[str] = "SmolLM3ForCausalLM"
    default_theta: ClassVar[float] = 2_000_000.0

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    bos_token_id: int | None = 128000
    eos_token_id: int | list[int] | None = 128001
    pad_token_id: int | None = 128004
    tie_word_embeddings: bool = True
    mlp_bias: bool = False
    """Biases in the feed-forward blocks."""
    use_sliding_window: bool = False
    """Whether sliding_window is used."""
    sliding_window: int | None = None
    """A token sees this many tokens in sliding layers."""
    no_rope_layers: list | None = None
    """For each layer 1 where it rotates, 0 where it does not; None derives it from the interval."""
    no_rope_layer_interval: int = 4
    """Every so many layers one does not rotate."""
    layer_types: list | None = None
    """Kind of attention of each layer; None derives it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        count, every = self.num_hidden_layers, self.no_rope_layer_interval
        if self.no_rope_layers is None:
            self.no_rope_layers = [int((i + 1) % every != 0) for i in range(count)]
        if self.layer_types is None:
            slides = self.use_sliding_window and self.sliding_window is not None
            self.layer_types = [FULL if rotates or not slides else SLIDING for rotates in self.no_rope_layers]

    @property
    def layer_kinds(self) -> list[str]:
        return self.layer_types or []


@dataclass(kw_only=True)
class GraniteConfig(LlamaConfig):
    """config.json with model_type "granite": Llama with four multipliers."""

    model_type: ClassVar[str] = "granite"
    architecture: ClassVar[str] = "GraniteForCausalLM"

    embedding_multiplier: float = 1.0
    """Multiplies the embeddings."""
    logits_scaling: float = 1.0
    """Divides the logits."""
    residual_multiplier: float = 1.0
    """Multiplies what each block adds to the residual stream."""
    attention_multiplier: float = 1.0
    """Multiplies the attention scores, in place of 1 / sqrt(head_dim)."""


def _llama(config: LlamaConfig) -> Decoder:
    return _decoder(config, [_layer(config, i, mlp_bias=config.mlp_bias) for i in range(config.num_hidden_layers)])


def _mistral(config: MistralConfig) -> Decoder:
    layers = [_layer(config, i, window=config.sliding_window) for i in range(config.num_hidden_layers)]
    return _decoder(config, layers)


def _smollm3(config: SmolLM3Config) -> Decoder:
    rotates = config.no_rope_layers or []
    return _decoder(config, [
        _layer(
            config, i, window=config.sliding_window, mlp_bias=config.mlp_bias, rope="default" if rotates[i] else None
        )
        for i in range(config.num_hidden_layers)
    ])  # fmt: skip


def _granite(config: GraniteConfig) -> Decoder:
    scale, residual = config.attention_multiplier, config.residual_multiplier
    layers = [
        _layer(config, i, mlp_bias=config.mlp_bias, scale=scale, residual_scale=residual)
        for i in range(config.num_hidden_layers)
    ]
    return _decoder(config, layers, embed_scale=config.embedding_multiplier)


def _granite_head(config: GraniteConfig) -> HeadSpec:
    return HeadSpec(tied=config.tie_word_embeddings, scale=1.0 / config.logits_scaling)


def _layer(
    config: ModelConfig,
    index: int,
    *,
    window: int | None = None,
    rope: str | None = "default",
    scale: float | None = None,
    residual_scale: float = 1.0,
    mlp_bias: bool = False,
) -> PreNormLayer:
    spec = attention_spec(config, index, window=window, scale=scale, rope=rope)
    biased = config.attention_bias
    attn = Attention(spec, config.hidden_size, qkv_bias=biased, out_bias=biased)
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, mlp_bias)
    return PreNormLayer(attn, mlp, config.hidden_size, config.rms_norm_eps, residual_scale)


def _decoder(config: ModelConfig, layers: list[PreNormLayer], embed_scale: float = 1.0) -> Decoder:
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=layers,
        norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
        ropes=config.ropes,
        embed_scale=embed_scale,
    )


SPECS = (
    ModelSpec(config=LlamaConfig, decoder=_llama, head=plain_head, weight_map=WeightMap()),
    ModelSpec(config=MistralConfig, decoder=_mistral, head=plain_head, weight_map=WeightMap()),
    ModelSpec(config=SmolLM3Config, decoder=_smollm3, head=plain_head, weight_map=WeightMap()),
    ModelSpec(config=GraniteConfig, decoder=_granite, head=_granite_head, weight_map=WeightMap()),
)
