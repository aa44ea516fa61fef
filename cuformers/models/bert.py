"""BERT (arXiv 1810.04805) and what has its shape, such as MiniLM: learned positions, norms after each block."""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from cuformers.base.errors import bad_argument
from cuformers.checkpoint.weight_map import WeightMap
from cuformers.models.encoder_config import EncoderConfig
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.attention.block import Attention
from cuformers.nn.backbone import Backbone
from cuformers.nn.dense import DenseActivation, DenseNorm
from cuformers.nn.mlp import activation
from cuformers.nn.norm import LayerNorm
from cuformers.nn.rope import RotarySet
from cuformers.nn.step import Step


@dataclass(kw_only=True)
class BertConfig(EncoderConfig):
    """config.json with model_type "bert"."""

    model_type: ClassVar[str] = "bert"
    architecture: ClassVar[str] = "BertModel"
    harmless: ClassVar[frozenset[str]] = frozenset({
        "classifier_dropout", "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
    })  # fmt: skip

    hidden_act: str = "gelu"
    """Activation between the two maps of a feed-forward block."""
    hidden_dropout_prob: float = 0.1
    """Dropout of embeddings and of what blocks add, in training."""
    attention_probs_dropout_prob: float = 0.1
    """Dropout of attention weights in training."""
    type_vocab_size: int = 2
    """Kinds of tokens: of a first and of a second text."""
    layer_norm_eps: float = 1e-12
    """Added to the variance before the root."""
    position_embedding_type: str = "absolute"
    """Only learned positions that are added to the embeddings are built."""
    is_decoder: bool = False
    """A causal BERT; only the encoder is built."""
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("position_embedding_type", "absolute"), ("is_decoder", False)):
            if getattr(self, name) != allowed:
                raise bad_argument(f"config.{name}", getattr(self, name), repr(allowed), "Nothing else is built.")

    @property
    def dropouts(self) -> dict[str, float]:
        return {n: getattr(self, n) for n in ("hidden_dropout_prob", "attention_probs_dropout_prob")}

    @property
    def num_token_types(self) -> int:
        return self.type_vocab_size


class Embeddings(nn.Module):
    """Of the token, its kind and its position, summed and normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """[T], [T], [T] or None for kind 0 -> [T, H]."""
        kind = self.token_type_embeddings.weight[0] if token_types is None else self.token_type_embeddings(token_types)
        return self.LayerNorm(self.word_embeddings(tokens) + kind, self.position_embeddings(positions))


class SelfAttention(Attention):
    """The heads; the map back to the stream belongs to the block around."""

    def _make_input(self, hidden_size: int, bias: bool) -> None:
        self.query = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.key = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.value = nn.Linear(hidden_size, hidden_size, bias=bias)

    def _make_output(self, hidden_size: int, bias: bool) -> None:
        pass

    @property
    def leaves(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value

    def storage_groups(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f"{name}.{kind}" for name in ("query", "key", "value")) for kind in ("weight", "bias"))

    def heads(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, heads * head_dim]; nothing is rotated, so that queries and keys go as they are."""
        assert step.backend is not None, "a full step names its attention backend"
        q, k, v = self._qkv(x, None).unflatten(-1, (3, self.spec.num_heads, self.spec.head_dim)).unbind(1)
        return step.backend.forward(q, k, v, self.spec, step).flatten(1)


class AttentionBlock(nn.Module):
    """norm(x + out(heads(x)))."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.self = SelfAttention(config.attention_spec(layer), config.hidden_size, qkv_bias=True)
        self.output = DenseNorm(config.hidden_size, config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.output(self.self.heads(x, step), x)


class Layer(nn.Module):
    """Attention, then two maps with an activation between; the sum with the stream is normalised after each."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.attention = AttentionBlock(config, layer)
        act = activation(config.hidden_act)
        self.intermediate = DenseActivation(config.hidden_size, config.intermediate_size, act)
        self.output = DenseNorm(config.intermediate_size, config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        x = self.attention(x, step)
        return self.output(self.intermediate(x), x)


class Bert(Backbone):
    """Embeddings, layers, and a pooler where the checkpoint has one."""

    layers_at = "encoder.layer"

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.pooler: DenseActivation | None = DenseActivation(config.hidden_size, config.hidden_size, torch.tanh)
        self.rotary = RotarySet({})
        self.max_positions = config.max_position_embeddings

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(cast(Layer, layer).attention.self.spec for layer in self.stack)

    @property
    def embedding(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def hidden_states(self, tokens: Tensor, step: Step, token_types: Tensor | None = None) -> Tensor:
        x = self.embeddings(tokens, step.positions, token_types)
        for layer in self.stack:
            x = layer(x, step)
        return x

    def pool(self, first: Tensor) -> Tensor | None:
        return None if self.pooler is None else self.pooler(first)


OLDER = {".gamma": ".weight", ".beta": ".bias"}
"""Endings of names in files of TensorFlow's time."""
SPECS = (
    ModelSpec(config=BertConfig, encoder=Bert, weight_map=WeightMap(older=OLDER), prefix="bert.", optional=("pooler",)),
)
