"""OLMo 2: norms after each block, and on the whole query and key projections (arXiv 2501.00656)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cuformers.checkpoint.weight_map import WeightMap
from cuformers.models.config import ModelConfig
from cuformers.models.parts import attention_spec, plain_head
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.attention.block import Attention
from cuformers.nn.decoder import Decoder
from cuformers.nn.layers import PostNormLayer
from cuformers.nn.mlp import GatedMLP
from cuformers.nn.norm import RMSNorm


@dataclass(kw_only=True)
class Olmo2Config(ModelConfig):
    """config.json with model_type "olmo2"."""

    model_type: ClassVar[str] = "olmo2"
    architecture: ClassVar[str] = "Olmo2ForCausalLM"

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 50279
    pad_token_id: int | None = 1


class WholeNormAttention(Attention):
    """Attention that normalises all query heads together, and all key heads together, before they are split."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, eps: float, bias: bool) -> None:
        super().__init__(spec, hidden_size, qkv_bias=bias, out_bias=bias)
        self.q_norm = RMSNorm(spec.num_heads * spec.head_dim, eps)
        self.k_norm = RMSNorm(spec.num_kv_heads * spec.head_dim, eps)

    def _qkv(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        heads, kv_heads = (n * self.spec.head_dim for n in (self.spec.num_heads, self.spec.num_kv_heads))
        q, k, v = super()._qkv(x, norm).split((heads, kv_heads, kv_heads), dim=-1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)


def _decoder(config: Olmo2Config) -> Decoder:
    layers = []
    for index in range(config.num_hidden_layers):
        attn = WholeNormAttention(
            attention_spec(config, index), config.hidden_size, config.rms_norm_eps, config.attention_bias
        )
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        layers.append(PostNormLayer(attn, mlp, config.hidden_size, config.rms_norm_eps))
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=layers,
        norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
        ropes=config.ropes,
    )


SPECS = (ModelSpec(config=Olmo2Config, decoder=_decoder, head=plain_head, weight_map=WeightMap()),)
