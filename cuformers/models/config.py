"""config.json as an object: what every dense decoder's configuration shares.

Transformers 5 writes `rope_parameters` and `dtype`; older files have `rope_theta`, `rope_scaling` and `torch_dtype`.
Both are read, the newer form is written. A key that nobody understands is said, and kept for the next save.
"""

import math
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

import torch

from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.models.config_checks import FULL, check_config, check_numbers
from cuformers.models.rope_config import normalise_rope
from cuformers.nn.rope import RopeSpec, is_number

HARMLESS = frozenset({
    "_name_or_path", "architectures", "auto_map", "chunk_size_feed_forward", "gradient_checkpointing", "id2label",
    "is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states", "pretraining_tp",
    "problem_type", "return_dict", "task_specific_params", "tokenizer_class", "transformers_version", "unsloth_fixed",
    "use_cache", "cache_implementation", "_attn_implementation_autoset", "unsloth_version",
    "is_llama_config", "rope_interleaved", "resid_pdrop", "embd_pdrop", "add_cross_attention", "tie_encoder_decoder",
})  # fmt: skip
"""Keys of real config.json files that say nothing about how the model computes at inference."""


@dataclass(kw_only=True)
class ModelConfig:
    """The configuration of a dense decoder; field names are config.json's.

    Mutable, as programs set `config.pad_token_id` and the like; what shapes the model is read when it is built.
    """

    model_type: ClassVar[str] = ""
    architecture: ClassVar[str] = ""
    default_theta: ClassVar[float] = 10_000.0

    vocab_size: int = 32000
    """Rows of the embedding."""
    hidden_size: int = 4096
    """Width of the residual stream."""
    intermediate_size: int = 11008
    """Width inside the feed-forward blocks."""
    num_hidden_layers: int = 32
    """Number of layers."""
    num_attention_heads: int = 32
    """Query heads of each layer."""
    num_key_value_heads: int | None = None
    """Key-value heads of each layer; None means one for each query head."""
    head_dim: int | None = None
    """Elements of a head; None means hidden_size / num_attention_heads."""
    hidden_act: str = "silu"
    """Activation of the feed-forward gate."""
    max_position_embeddings: int = 2048
    """Longest sequence the model is meant for."""
    initializer_range: float = 0.02
    """Standard deviation of random weights."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square before the root."""
    tie_word_embeddings: bool = False
    """The head is the embedding matrix."""
    rope_parameters: dict[str, Any] | None = None
    """rope_type, rope_theta and the scaling's own keys; or one such dict for each layer type."""
    attention_bias: bool = False
    """Biases on q, k, v and o."""
    attention_dropout: float = 0.0
    """Dropout of attention weights in training."""
    bos_token_id: int | None = None
    """Begins a text."""
    eos_token_id: int | list[int] | None = None
    """Ends a text; several are possible."""
    pad_token_id: int | None = None
    """Fills up a batch."""
    dtype: torch.dtype | None = None
    """Dtype of the checkpoint's weights."""
    attn_implementation: str | dict | None = None
    """Attention backend to use where the load names none and it can serve the model."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of the file that have no field here, kept for saving."""

    def __post_init__(self) -> None:
        self._check_types()
        check_numbers(self)
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

    def _check_types(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):
            value, hint = getattr(self, f.name), hints[f.name]
            kinds = tuple(get_origin(k) or k for k in _members(hint))
            if float in kinds and int not in kinds and isinstance(value, int) and not isinstance(value, bool):
                setattr(self, f.name, value := float(value))
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                names = " or ".join(k.__name__ for k in kinds)
                raise bad_argument(f"config.{f.name}", value, names, "Check config.json.")
            if isinstance(value, float) and not math.isfinite(value):
                raise bad_argument(f"config.{f.name}", value, "a finite number", "Check config.json.")

    @property
    def _attn_implementation(self) -> str | dict | None:
        """The same, by the name that Transformers gives it."""
        return self.attn_implementation

    @_attn_implementation.setter
    def _attn_implementation(self, value: str | dict | None) -> None:
        self.attn_implementation = value

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
        known = {f.name for f in fields(RopeSpec)} - {"dim", "max_position_embeddings"}
        values: dict[str, Any] = {k: v for k, v in parameters.items() if k in known}
        values |= {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
        assert self.head_dim is not None
        share = parameters.get("partial_rotary_factor")
        share = 1.0 if share is None else share
        if not is_number(share) or not 0 < share <= 1:
            raise bad_argument("rope_parameters['partial_rotary_factor']", share, "a number above 0, up to 1")
        dim = int(self.head_dim * share)
        return RopeSpec(dim=dim, max_position_embeddings=self.max_position_embeddings, **values)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-text tokens as a tuple."""
        eos = self.eos_token_id
        return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Reads what config.json holds; keys that nobody understands are said in one notice and kept."""
        values = {k: v for k, v in raw.items() if k not in ("torch_dtype", "dtype")}
        older = values.pop("_attn_implementation", None)
        if older is not None:
            values.setdefault("attn_implementation", older)
        own = {f.name for f in fields(cls)} - {"extra", "dtype"}
        nulls = {k for k, v in values.items() if k in own and v is None and _has_default(cls, k)}
        given: dict[str, Any] = {k: v for k, v in values.items() if k in own - nulls}
        extra = {k: v for k, v in values.items() if k not in own}
        given |= {"extra": extra, "dtype": _read_dtype(raw.get("dtype", raw.get("torch_dtype")))}
        config = cls(**given)
        check_config(config)
        unknown = sorted(k for k in config.extra if k not in HARMLESS)
        if unknown:
            notice(f"config keys without meaning for {cls.model_type!r}, kept but not used: {', '.join(unknown)}")
        return config

    def to_dict(self) -> dict[str, Any]:
        """What goes into config.json."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("extra", "dtype")}
        if own["attn_implementation"] is None:
            del own["attn_implementation"]
        out = {**self.extra, **own, "model_type": self.model_type, "architectures": [self.architecture]}
        if self.dtype is not None:
            out["dtype"] = str(self.dtype).removeprefix("torch.")
        return out


def _has_default(cls: type, name: str) -> bool:
    """A null in the file means the default, where the field's type has no None."""
    f = next(f for f in fields(cls) if f.name == name)
    return type(None) not in _members(get_type_hints(cls)[name]) and f.default is not MISSING


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _read_dtype(value: object) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise bad_argument("config.dtype", value, "'bfloat16', 'float16' or 'float32'", "Check config.json.")
    return dtype
