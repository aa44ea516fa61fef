"""gpt-oss: a mixture in every layer, with biases and a clamped activation; sinks; every other layer slides."""

from dataclasses import dataclass
from typing import ClassVar

from cuformers.base.errors import bad_argument
from cuformers.checkpoint.weight_map import WeightMap
from cuformers.models.config_checks import FULL, SLIDING
from cuformers.models.moe_config import MoEConfig
from cuformers.models.parts import attention_spec, plain_head
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.block import Attention
from cuformers.nn.decoder import Decoder
from cuformers.nn.layers import PreNormLayer
from cuformers.nn.moe import BiasedMoE
from cuformers.nn.norm import RMSNorm

LIMIT = 7.0
"""The only swiglu_limit that there is a kernel for, and that Transformers computes."""


@dataclass(kw_only=True)
class GptOssConfig(MoEConfig):
    """config.json with model_type "gpt_oss"."""

    model_type: ClassVar[str] = "gpt_oss"
    architecture: ClassVar[str] = "GptOssForCausalLM"
    default_theta: ClassVar[float] = 150_000.0
    harmless: ClassVar[frozenset[str]] = frozenset({"experts_per_token", "initial_context_length"})

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    """Width of each expert."""
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: int | None = 128
    """A token sees this many tokens in sliding layers."""
    layer_types: list | None = None
    """Kind of attention of each layer; None lets them take turns, sliding first."""
    num_local_experts: int = 128
    """Experts of each layer."""
    num_experts_per_tok: int = 4
    swiglu_limit: float = LIMIT
    """Bound of gate and up."""

    def __post_init__(self) -> None:
        if self.rope_parameters is None and not {"rope_scaling", "rope_theta"} & self.extra.keys():
            self.rope_parameters = {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            }
        super().__post_init__()
        if self.swiglu_limit != LIMIT:
            raise bad_argument("config.swiglu_limit", self.swiglu_limit, str(LIMIT), "Check config.json.")
        if self.layer_types is None:
            self.layer_types = [FULL if i % 2 else SLIDING for i in range(self.num_hidden_layers)]

    @property
    def expert_count(self) -> int:
        return self.num_local_experts

    @property
    def layer_kinds(self) -> list[str]:
        return self.layer_types or []


def _decoder(config: GptOssConfig) -> Decoder:
    layers = []
    for index in range(config.num_hidden_layers):
        spec = attention_spec(config, index, window=config.sliding_window, sinks=True)
        biased = config.attention_bias
        attn = Attention(spec, config.hidden_size, qkv_bias=biased, out_bias=biased)
        moe = BiasedMoE(
            config.hidden_size,
            config.intermediate_size,
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
        )
        layers.append(PreNormLayer(attn, moe, config.hidden_size, config.rms_norm_eps))
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=layers,
        norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
        ropes=config.ropes,
    )


SPECS = (ModelSpec(config=GptOssConfig, decoder=_decoder, head=plain_head, weight_map=WeightMap()),)
