"""Gemma 2 and the text model of Gemma 3: scaled embeddings, norms around each block, sliding and full layers."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cuformers.checkpoint.weight_map import WeightMap
from cuformers.models.config import ModelConfig
from cuformers.models.config_checks import FULL, SLIDING
from cuformers.models.parts import attention_spec
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.block import Attention
from cuformers.nn.decoder import Decoder, HeadSpec
from cuformers.nn.layers import SandwichLayer
from cuformers.nn.mlp import GatedMLP
from cuformers.nn.norm import RMSNorm
from cuformers.nn.rope import RopeSpec

NORM_OFFSET = 1.0  # Gemma stores its norm weights around zero


@dataclass(kw_only=True)
class Gemma2Config(ModelConfig):
    """config.json with model_type "gemma2"; layers alternate between sliding and full attention."""

    model_type: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0
    hidden_activation: str = "gelu_pytorch_tanh"
    """Activation of the feed-forward gate; `hidden_act` is not used."""
    query_pre_attn_scalar: int | float = 256
    """Scores are divided by the root of this."""
    sliding_window: int | None = 4096
    """A token sees this many tokens in sliding layers."""
    layer_types: list | None = None
    """Kind of attention of each layer; None derives it."""
    final_logit_softcapping: float | None = 30.0
    """Bounds the logits."""
    attn_logit_softcapping: float | None = 50.0
    """Bounds the attention scores."""
    use_bidirectional_attention: bool | None = None
    """Attention in both directions; only causal attention is built."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_bidirectional_attention:
            raise ValueError("config.use_bidirectional_attention=True is not possible: only causal decoders are built.")
        every = self._full_layer_every()
        if self.layer_types is None:
            self.layer_types = [SLIDING if (i + 1) % every else FULL for i in range(self.num_hidden_layers)]

    def _full_layer_every(self) -> int:
        return 2

    @property
    def layer_kinds(self) -> list[str]:
        return self.layer_types or []


@dataclass(kw_only=True)
class Gemma3TextConfig(Gemma2Config):
    """config.json with model_type "gemma3_text"; one layer in six is full, and it has its own rotary base."""

    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    default_theta: ClassVar[float] = 1_000_000.0
    local_theta: ClassVar[float] = 10_000.0
    base_architecture: ClassVar[str] = "Gemma3TextModel"

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        local = float(self.extra.pop("rope_local_base_freq", self.local_theta))
        super().__post_init__()
        rope = self.rope_parameters or {}
        if FULL not in rope:
            rope = {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": local}}
        self.rope_parameters = rope

    def _full_layer_every(self) -> int:
        named = [self.extra.pop(key, None) for key in ("sliding_window_pattern", "_sliding_window_pattern")]
        return next((int(every) for every in named if every is not None), 6)

    @property
    def ropes(self) -> dict[str, RopeSpec]:
        return {kind: self.rope_spec(parameters) for kind, parameters in (self.rope_parameters or {}).items()}


def _gemma2(config: Gemma2Config) -> Decoder:
    return _decoder(config, dict.fromkeys((FULL, SLIDING), "default"), qk_norm=None)


def _gemma3(config: Gemma3TextConfig) -> Decoder:
    return _decoder(config, {kind: kind for kind in (FULL, SLIDING)}, qk_norm=(config.rms_norm_eps, NORM_OFFSET))


def _decoder(config: Gemma2Config, rope_of: dict[str, str], qk_norm: Any) -> Decoder:
    layers = []
    for index, kind in enumerate(config.layer_kinds):
        spec = attention_spec(
            config,
            index,
            window=config.sliding_window,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
            rope=rope_of[kind],
        )
        biased = config.attention_bias
        attn = Attention(spec, config.hidden_size, qkv_bias=biased, out_bias=biased, qk_norm=qk_norm)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_activation)
        layers.append(SandwichLayer(attn, mlp, config.hidden_size, config.rms_norm_eps, NORM_OFFSET))
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=layers,
        norm=RMSNorm(config.hidden_size, config.rms_norm_eps, NORM_OFFSET),
        ropes=config.ropes,
        embed_scale=config.hidden_size**0.5,
    )


def _head(config: Gemma2Config) -> HeadSpec:
    return HeadSpec(tied=config.tie_word_embeddings, softcap=config.final_logit_softcapping)


SPECS = (
    ModelSpec(config=Gemma2Config, decoder=_gemma2, head=_head, weight_map=WeightMap()),
    ModelSpec(config=Gemma3TextConfig, decoder=_gemma3, head=_head, weight_map=WeightMap()),
)
