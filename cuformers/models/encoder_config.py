"""What every encoder's configuration shares."""

from dataclasses import dataclass

from cuformers.base.errors import bad_argument
from cuformers.models.base_config import BaseConfig
from cuformers.nn.attention.backend import AttentionSpec


@dataclass(kw_only=True)
class EncoderConfig(BaseConfig):
    """The configuration of an encoder: attention looks both ways, and there is no head."""

    vocab_size: int = 30522
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.num_attention_heads:
            allowed = f"a multiple of num_attention_heads={self.num_attention_heads}"
            raise bad_argument("config.hidden_size", self.hidden_size, allowed, "Check config.json.")

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.num_attention_heads

    def attention_spec(self, layer: int, *, window: int | None = None, rope: str | None = None) -> AttentionSpec:
        """The attention of one layer."""
        return AttentionSpec(
            layer=layer,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=window,
            causal=False,
            rope=rope,
        )
