"""ModernBERT (arXiv 2412.13663): rotary positions, gated feed-forward blocks, windows in two layers of three."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from cuformers.base.errors import bad_argument
from cuformers.checkpoint.weight_map import WeightMap
from cuformers.models.config_checks import FULL, SLIDING
from cuformers.models.encoder_config import EncoderConfig
from cuformers.models.rope_config import normalise_rope, rope_spec
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.attention.block import Attention
from cuformers.nn.backbone import Backbone
from cuformers.nn.mlp import PackedMLP
from cuformers.nn.norm import LayerNorm
from cuformers.nn.rope import RopeSpec, RotarySet
from cuformers.nn.step import Step

LEFT_OVER = ("layer_norm_eps", "position_embedding_type", "reference_compile", "repad_logits_with_grad")
"""Keys of published files that were never used, or not for what the model computes."""


@dataclass(kw_only=True)
class ModernBertConfig(EncoderConfig):
    """config.json with model_type "modernbert"."""

    model_type: ClassVar[str] = "modernbert"
    architecture: ClassVar[str] = "ModernBertModel"
    default_theta: ClassVar[float] = 160_000.0
    local_theta: ClassVar[float] = 10_000.0
    harmless: ClassVar[frozenset[str]] = frozenset({
        "classifier_activation", "classifier_bias", "classifier_dropout", "classifier_pooling", "cls_token_id",
        "decoder_bias", "deterministic_flash_attn", "initializer_cutoff_factor", "sep_token_id",
        "sparse_pred_ignore_index", "sparse_prediction",
    })  # fmt: skip

    vocab_size: int = 50368
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    max_position_embeddings: int = 8192
    hidden_activation: str = "gelu"
    """Activation of the feed-forward gate."""
    norm_eps: float = 1e-5
    """Added to the variance before the root."""
    norm_bias: bool = False
    """Biases in the norms."""
    attention_bias: bool = False
    """Biases on the maps around attention."""
    mlp_bias: bool = False
    """Biases in the feed-forward blocks."""
    layer_types: list | None = None
    """Kind of attention of each layer; None derives it: every third is full, beginning with the first."""
    local_attention: int = 128
    """A token of a sliding layer sees the tokens up to half of this away, on both sides."""
    rope_parameters: dict[str, Any] | None = None
    """For each kind of layer rope_type, rope_theta and the scaling's own keys."""
    attention_dropout: float = 0.0
    """Dropout of attention weights in training."""
    embedding_dropout: float = 0.0
    """Dropout of embeddings in training."""
    mlp_dropout: float = 0.0
    """Dropout in the feed-forward blocks in training."""
    bos_token_id: int | None = 50281
    eos_token_id: int | list[int] | None = 50282
    pad_token_id: int | None = 50283

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_attention <= 0:
            raise bad_argument("config.local_attention", self.local_attention, "a number above 0", "Check config.json.")
        every = self.extra.pop("global_attn_every_n_layers", None) or 3
        for name in LEFT_OVER:
            self.extra.pop(name, None)
        if self.layer_types is None:
            self.layer_types = [SLIDING if i % every else FULL for i in range(self.num_hidden_layers)]
        self._fill_in_rope()

    def _fill_in_rope(self) -> None:
        """Older files name the base of each kind of layer by itself; a local one of null is the global one."""
        base = self.extra.pop("global_rope_theta", None) or self.default_theta
        local = self.extra.pop("local_rope_theta", self.local_theta) or base
        given = self.rope_parameters or {}
        thetas = {FULL: base, SLIDING: local}
        self.rope_parameters = {k: {"rope_theta": theta, **(given.get(k) or {})} for k, theta in thetas.items()}
        self.rope_parameters = normalise_rope(self)

    @property
    def ropes(self) -> dict[str, RopeSpec]:
        given = self.rope_parameters or {}
        return {kind: rope_spec(one, self.head_dim, self.max_position_embeddings) for kind, one in given.items()}

    @property
    def dropouts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("attention_dropout", "embedding_dropout", "mlp_dropout")}


class Embeddings(nn.Module):
    """Of the token, normalised."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, H]."""
        return self.norm(self.tok_embeddings(tokens))


class PackedAttention(Attention):
    """Attention whose q, k and v are one parameter."""

    def _make_input(self, hidden_size: int, bias: bool) -> None:
        self.Wqkv = nn.Linear(hidden_size, 3 * hidden_size, bias=bias)

    def _make_output(self, hidden_size: int, bias: bool) -> None:
        self.Wo = nn.Linear(hidden_size, hidden_size, bias=bias)

    @property
    def output(self) -> nn.Module:
        return self.Wo

    @property
    def leaves(self) -> tuple[nn.Module, ...]:
        return (self.Wqkv,)

    def storage_groups(self) -> tuple[tuple[str, ...], ...]:
        return ()


class MLP(PackedMLP):
    """The gated block under this family's names."""

    def _make_input(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self.Wi = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)

    def _make_output(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self.Wo = nn.Linear(intermediate_size, hidden_size, bias=bias)

    @property
    def output(self) -> nn.Module:
        return self.Wo

    @property
    def leaves(self) -> tuple[nn.Module, ...]:
        return (self.Wi,)


class Layer(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)); the first layer's input is normalised already."""

    def __init__(self, config: ModernBertConfig, index: int) -> None:
        super().__init__()
        assert config.layer_types is not None
        kind, norm = config.layer_types[index], (config.hidden_size, config.norm_eps, config.norm_bias)
        window = config.local_attention // 2 + 1 if kind == SLIDING else None
        spec = config.attention_spec(index, window=window, rope=kind)
        biased = config.attention_bias
        self.attn_norm = LayerNorm(*norm) if index else nn.Identity()
        self.attn = PackedAttention(spec, config.hidden_size, qkv_bias=biased, out_bias=biased)
        self.mlp_norm = LayerNorm(*norm)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_activation, config.mlp_bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        h, x = self.mlp_norm.of_sum(self.attn(self.attn_norm(x), step), x)
        return self.mlp(h, residual=x, overwrite=True)


class ModernBert(Backbone):
    """Embeddings, layers and a final norm."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)
        self.rotary = RotarySet(config.ropes)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(cast(Layer, layer).attn.spec for layer in self.layers)

    @property
    def embedding(self) -> nn.Embedding:
        return self.embeddings.tok_embeddings

    def hidden_states(self, tokens: Tensor, step: Step, token_types: Tensor | None = None) -> Tensor:
        assert token_types is None, "ModernBERT knows no kinds of tokens"
        step = replace(step, rope=self.rotary(step))
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, step)
        return self.final_norm(x)


SPECS = (ModelSpec(config=ModernBertConfig, encoder=ModernBert, weight_map=WeightMap(), prefix="model."),)
