"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE: small experts, in the former beside one block that every token goes through."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cuformers.models.config_checks import FULL, SLIDING
from cuformers.models.moe_config import SINGLE_EXPERTS, MoEConfig
from cuformers.models.parts import attention_spec, plain_head
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.block import Attention
from cuformers.nn.decoder import Decoder
from cuformers.nn.layers import PreNormLayer
from cuformers.nn.mlp import GatedMLP
from cuformers.nn.moe import MoE, SharedMoE
from cuformers.nn.norm import RMSNorm


@dataclass(kw_only=True)
class QwenMoEConfig(MoEConfig):
    """What both families have."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    """Whether sliding_window is used."""
    sliding_window: int | None = 4096
    """A token sees this many tokens in sliding layers."""
    moe_intermediate_size: int = 768
    """Width of each expert; intermediate_size is that of the layers without."""
    num_experts: int = 128
    """Experts of each layer."""
    norm_topk_prob: bool = False
    """A token's weights are divided by their sum."""
    decoder_sparse_step: int = 1
    """Every so many layers one has experts."""
    mlp_only_layers: list | None = None
    """Indices of more layers without experts."""

    def __post_init__(self) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.mlp_only_layers is None:
            self.mlp_only_layers = []
        super().__post_init__()

    def has_experts(self, layer: int) -> bool:
        """Whether the layer's feed-forward block is a mixture."""
        return layer not in (self.mlp_only_layers or ()) and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(kw_only=True)
class Qwen2MoeConfig(QwenMoEConfig):
    """config.json with model_type "qwen2_moe"."""

    model_type: ClassVar[str] = "qwen2_moe"
    architecture: ClassVar[str] = "Qwen2MoeForCausalLM"

    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    """Width of the block that every token goes through."""
    num_experts_per_tok: int = 4
    num_experts: int = 60
    qkv_bias: bool = True
    """Biases on q, k and v."""
    max_window_layers: int = 28
    """Layers from this index on see everything."""
    layer_types: list | None = None
    """Kind of attention of each layer; None derives it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is None:
            last = self.max_window_layers if self.use_sliding_window else 0
            self.layer_types = [FULL if i % 2 or i >= last else SLIDING for i in range(self.num_hidden_layers)]

    @property
    def layer_kinds(self) -> list[str]:
        return self.layer_types or []


@dataclass(kw_only=True)
class Qwen3MoeConfig(QwenMoEConfig):
    """config.json with model_type "qwen3_moe"; with a window, every layer slides."""

    model_type: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"max_window_layers"})

    intermediate_size: int = 6144
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 4

    @property
    def layer_kinds(self) -> list[str]:
        return [FULL if self.sliding_window is None else SLIDING] * self.num_hidden_layers


def _qwen2_moe(config: Qwen2MoeConfig) -> Decoder:
    moes = [
        SharedMoE(*_sizes(config), **_routing(config), shared_size=config.shared_expert_intermediate_size)
        if config.has_experts(i)
        else None
        for i in range(config.num_hidden_layers)
    ]
    return _decoder(config, moes, {"qkv_bias": config.qkv_bias})


def _qwen3_moe(config: Qwen3MoeConfig) -> Decoder:
    moes = [
        MoE(*_sizes(config), **_routing(config)) if config.has_experts(i) else None
        for i in range(config.num_hidden_layers)
    ]
    biased = config.attention_bias
    return _decoder(config, moes, {"qkv_bias": biased, "out_bias": biased, "qk_norm": (config.rms_norm_eps, 0.0)})


def _sizes(config: QwenMoEConfig) -> tuple[int, int, str]:
    return config.hidden_size, config.moe_intermediate_size, config.hidden_act


def _routing(config: QwenMoEConfig) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "top_k": config.num_experts_per_tok,
        "normalise": config.norm_topk_prob,
    }


def _decoder(config: QwenMoEConfig, moes: list[Any], attention: dict[str, Any]) -> Decoder:
    layers = []
    for index, moe in enumerate(moes):
        attn = Attention(attention_spec(config, index, window=config.sliding_window), config.hidden_size, **attention)
        mlp = moe or GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        layers.append(PreNormLayer(attn, mlp, config.hidden_size, config.rms_norm_eps))
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=layers,
        norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
        ropes=config.ropes,
    )


SPECS = (
    ModelSpec(config=Qwen2MoeConfig, decoder=_qwen2_moe, head=plain_head, weight_map=SINGLE_EXPERTS),
    ModelSpec(config=Qwen3MoeConfig, decoder=_qwen3_moe, head=plain_head, weight_map=SINGLE_EXPERTS),
)
