"""What every dense decoder's configuration shares.

Transformers 5 writes `rope_parameters` and `dtype`; older files have `rope_theta`, `rope_scaling` and `torch_dtype`.
Both are read, the newer form is written.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from cuformers.base.errors import bad_argument
from cuformers.models.base_config import BaseConfig
from cuformers.models.config_checks import FULL
from cuformers.models.rope_config import normalise_rope, rope_spec
from cuformers.nn.rope import RopeSpec


@dataclass(kw_only=True)
class ModelConfig(BaseConfig):
    """The configuration of a dense decoder."""

    default_theta: ClassVar[float] = 10_000.0

    num_key_value_heads: int | None = None
    """Key-value heads of each layer; None means one for each query head."""
    head_dim: int | None = None
    """Elements of a head; None means hidden_size / num_attention_heads."""
    hidden_act: str = "silu"
    """Activation of the feed-forward gate."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square before the root."""
    rope_parameters: dict[str, Any] | None = None
    """rope_type, rope_theta and the scaling's own keys; or one such dict for each layer type."""
    attention_bias: bool = False
    """Biases on q, k, v and o."""
    attention_dropout: float = 0.0
    """Dropout of attention weights in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            allowed = f"a divisor of num_attention_heads={self.num_attention_heads}"
            raise bad_argument("num_key_value_heads", self.num_key_value_heads, allowed)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                allowed = f"a multiple of num_attention_heads={self.num_attention_heads}"
                raise bad_argument("hidden_size", self.hidden_size, allowed, "Or give head_dim.")
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.rope_parameters = normalise_rope(self)

    @property
    def layer_kinds(self) -> list[str]:
        """Kind of attention of each layer: "full_attention" or "sliding_attention"."""
        return [FULL] * self.num_hidden_layers

    @property
    def ropes(self) -> dict[str, RopeSpec]:
        """Rotary embeddings by the name that layers use."""
        return {"default": self.rope_spec(self.rope_parameters or {})}

    def rope_spec(self, parameters: dict[str, Any]) -> RopeSpec:
        """One dict of rope_parameters as a RopeSpec."""
        assert self.head_dim is not None
        return rope_spec(parameters, self.head_dim, self.max_position_embeddings)

    @property
    def dropouts(self) -> dict[str, float]:
        named = {name: self.extra.get(name) or 0.0 for name in ("resid_pdrop", "embd_pdrop")}
        return {"attention_dropout": self.attention_dropout, **named}
