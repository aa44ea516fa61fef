"""OLMoE: norms over all heads together, as in OLMo 2, in pre-norm layers of experts (arXiv 2409.02060)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cuformers.models.moe_config import SINGLE_EXPERTS, MoEConfig
from cuformers.models.olmo2 import WholeNormAttention
from cuformers.models.parts import attention_spec, plain_head
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.decoder import Decoder
from cuformers.nn.layers import PreNormLayer
from cuformers.nn.moe import MoE
from cuformers.nn.norm import RMSNorm


@dataclass(kw_only=True)
class OlmoeConfig(MoEConfig):
    """config.json with model_type "olmoe"."""

    model_type: ClassVar[str] = "olmoe"
    architecture: ClassVar[str] = "OlmoeForCausalLM"

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    """Width of each expert."""
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 50279
    clip_qkv: float | None = None
    """Queries, keys and values are kept within this of zero; None leaves them."""
    num_experts: int = 64
    """Experts of each layer."""
    router_aux_loss_coef: float = 0.01
    norm_topk_prob: bool = False
    """A token's weights are divided by their sum."""


class ClippedAttention(WholeNormAttention):
    """Attention whose normalised queries and keys, and values, are clipped."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, eps: float, bias: bool, clip: float | None) -> None:
        super().__init__(spec, hidden_size, eps, bias)
        self.clip = clip

    def _qkv(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        qkv = super()._qkv(x, norm)
        return qkv if self.clip is None else qkv.clamp(-self.clip, self.clip)


def _decoder(config: OlmoeConfig) -> Decoder:
    layers = []
    for index in range(config.num_hidden_layers):
        spec = attention_spec(config, index)
        attn = ClippedAttention(
            spec, config.hidden_size, config.rms_norm_eps, config.attention_bias, config.clip_qkv
        )
        moe = MoE(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            normalise=config.norm_topk_prob,
        )
        layers.append(PreNormLayer(attn, moe, config.hidden_size, config.rms_norm_eps))
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=layers,
        norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
        ropes=config.ropes,
    )


SPECS = (ModelSpec(config=OlmoeConfig, decoder=_decoder, head=plain_head, weight_map=SINGLE_EXPERTS),)
