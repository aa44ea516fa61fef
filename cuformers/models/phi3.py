"""Phi-3, Phi-3.5 and Phi-4: q, k, v and gate, up packed in the checkpoint, LongRoPE, partial rotation."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from cuformers.checkpoint.weight_map import WeightMap
from cuformers.models.config import ModelConfig
from cuformers.models.config_checks import FULL, SLIDING
from cuformers.models.parts import attention_spec, plain_head
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.block import Attention
from cuformers.nn.decoder import Decoder
from cuformers.nn.layers import PreNormLayer
from cuformers.nn.mlp import PackedMLP
from cuformers.nn.norm import RMSNorm


@dataclass(kw_only=True)
class Phi3Config(ModelConfig):
    """config.json with model_type "phi3"."""

    model_type: ClassVar[str] = "phi3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    """Longest sequence of pretraining; beyond it LongRoPE's long factors apply."""
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 32000
    pad_token_id: int | None = 32000
    sliding_window: int | None = None
    """A token sees this many tokens; None means all before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rope = self.rope_parameters or {}
        if rope.get("rope_type") in ("su", "yarn"):  # the names of early Phi-3 files for LongRoPE
            rope["rope_type"] = "longrope"
            rope["original_max_position_embeddings"] = self.original_max_position_embeddings

    @property
    def layer_kinds(self) -> list[str]:
        return [FULL if self.sliding_window is None else SLIDING] * self.num_hidden_layers


class PackedAttention(Attention):
    """Attention whose q, k and v are one parameter in the checkpoint."""

    def _make_input(self, hidden_size: int, bias: bool) -> None:
        spec = self.spec
        rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv_proj = nn.Linear(hidden_size, rows, bias=bias)

    @property
    def leaves(self) -> tuple[nn.Module, ...]:
        return (self.qkv_proj,)

    def storage_groups(self) -> tuple[tuple[str, ...], ...]:
        return ()


def _decoder(config: Phi3Config) -> Decoder:
    layers = []
    for index in range(config.num_hidden_layers):
        attn = PackedAttention(attention_spec(config, index, window=config.sliding_window), config.hidden_size)
        mlp = PackedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        layers.append(PreNormLayer(attn, mlp, config.hidden_size, config.rms_norm_eps))
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=layers,
        norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
        ropes=config.ropes,
    )


SPECS = (ModelSpec(config=Phi3Config, decoder=_decoder, head=plain_head, weight_map=WeightMap()),)
