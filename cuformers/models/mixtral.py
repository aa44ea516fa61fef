"""Mixtral: Mistral with eight experts in place of each feed-forward block (arXiv 2401.04088)."""

from dataclasses import dataclass
from typing import ClassVar

from cuformers.checkpoint.weight_map import Rename, Stack, WeightMap
from cuformers.models.config_checks import FULL, SLIDING
from cuformers.models.moe_config import MoEConfig
from cuformers.models.parts import attention_spec, plain_head
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.block import Attention
from cuformers.nn.decoder import Decoder
from cuformers.nn.layers import PreNormLayer
from cuformers.nn.moe import MoE
from cuformers.nn.norm import RMSNorm


@dataclass(kw_only=True)
class MixtralConfig(MoEConfig):
    """config.json with model_type "mixtral"."""

    model_type: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    default_theta: ClassVar[float] = 1_000_000.0

    intermediate_size: int = 14336
    """Width of each expert."""
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    sliding_window: int | None = None
    """A token sees this many tokens, itself included; None means all before it."""
    num_local_experts: int = 8
    """Experts of each layer."""
    num_experts_per_tok: int = 2
    router_jitter_noise: float = 0.0
    """Spread of noise on the blocks' inputs in training; refused there, as nothing here is random."""

    @property
    def expert_count(self) -> int:
        return self.num_local_experts

    @property
    def dropouts(self) -> dict[str, float]:
        return {**super().dropouts, "router_jitter_noise": self.router_jitter_noise}

    @property
    def layer_kinds(self) -> list[str]:
        return [FULL if self.sliding_window is None else SLIDING] * self.num_hidden_layers


def _decoder(config: MixtralConfig) -> Decoder:
    layers = []
    for index in range(config.num_hidden_layers):
        attn = Attention(attention_spec(config, index, window=config.sliding_window), config.hidden_size)
        moe = MoE(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            normalise=True,
        )
        layers.append(PreNormLayer(attn, moe, config.hidden_size, config.rms_norm_eps))
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=layers,
        norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
        ropes=config.ropes,
    )


_FILE, _MODULE = "model.layers.{layer}.block_sparse_moe", "model.layers.{layer}.mlp"
_WEIGHTS = WeightMap((
    Rename(f"{_FILE}.gate.weight", f"{_MODULE}.gate.weight"),
    Stack(
        (f"{_FILE}.experts.{{index}}.w1.weight", f"{_FILE}.experts.{{index}}.w3.weight"),
        f"{_MODULE}.experts.gate_up_proj",
    ),
    Stack(f"{_FILE}.experts.{{index}}.w2.weight", f"{_MODULE}.experts.down_proj"),
))  # fmt: skip

SPECS = (ModelSpec(config=MixtralConfig, decoder=_decoder, head=plain_head, weight_map=_WEIGHTS),)
