"""config.json as an object: what the configurations of decoders and encoders share.

A key that nobody understands is said, and kept for the next save.
"""

import math
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

import torch

from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.models.config_checks import check_config, check_numbers
from cuformers.nn.rope import RopeSpec

HARMLESS = frozenset({
    "_name_or_path", "architectures", "auto_map", "chunk_size_feed_forward", "gradient_checkpointing", "id2label",
    "is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states", "pretraining_tp",
    "problem_type", "return_dict", "task_specific_params", "tokenizer_class", "transformers_version", "unsloth_fixed",
    "use_cache", "cache_implementation", "_attn_implementation_autoset", "unsloth_version",
    "is_llama_config", "rope_interleaved", "resid_pdrop", "embd_pdrop", "add_cross_attention", "tie_encoder_decoder",
})  # fmt: skip
"""Keys of real config.json files that say nothing about how the model computes at inference."""


@dataclass(kw_only=True)
class BaseConfig:
    """A configuration; field names are config.json's.

    Mutable, as programs set `config.pad_token_id` and the like; what shapes the model is read when it is built.
    """

    model_type: ClassVar[str] = ""
    architecture: ClassVar[str] = ""
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Further keys of this family's files that say nothing about how the model computes at inference."""

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
    max_position_embeddings: int = 2048
    """Longest sequence the model is meant for."""
    initializer_range: float = 0.02
    """Standard deviation of random weights."""
    tie_word_embeddings: bool = False
    """The head is the embedding matrix."""
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

    @property
    def _attn_implementation(self) -> str | dict | None:
        """The same, by the name that Transformers gives it."""
        return self.attn_implementation

    @_attn_implementation.setter
    def _attn_implementation(self, value: str | dict | None) -> None:
        self.attn_implementation = value

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
    def ropes(self) -> dict[str, RopeSpec]:
        """Rotary embeddings by the name that layers use."""
        return {}

    @property
    def dropouts(self) -> dict[str, float]:
        """Shares that training would drop at random, by the name in config.json."""
        return {}

    @property
    def num_token_types(self) -> int:
        """Kinds of tokens that `token_type_ids` tells apart; 0 where the model knows none."""
        return 0

    @property
    def base_architecture(self) -> str:
        """Transformers' name of the model without a head."""
        return self.architecture.replace("ForCausalLM", "Model")

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
        unknown = sorted(k for k in config.extra if k not in HARMLESS | cls.harmless)
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
