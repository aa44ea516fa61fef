"""From a configuration to the shared blocks: the lines that every model file would otherwise repeat."""

from cuformers.models.config import ModelConfig
from cuformers.models.config_checks import SLIDING
from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.decoder import HeadSpec


def attention_spec(
    config: ModelConfig,
    layer: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    rope: str | None = "default",
    sinks: bool = False,
) -> AttentionSpec:
    """The attention of one layer; `window` applies where the layer's kind is sliding."""
    assert config.head_dim is not None and config.num_key_value_heads is not None
    return AttentionSpec(
        layer=layer,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if scale is None else scale,
        window=window if config.layer_kinds[layer] == SLIDING else None,
        softcap=softcap,
        rope=rope,
        sinks=sinks,
    )


def plain_head(config: ModelConfig) -> HeadSpec:
    """A head that leaves the logits as they are."""
    return HeadSpec(tied=config.tie_word_embeddings)
