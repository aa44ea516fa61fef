"""LoraConfig: PEFT's options of LoRA. Each is honoured or refused."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cuformers.base.errors import bad_argument
from cuformers.base.log import notice

ALL_LINEAR = "all-linear"
_SAYS_NOTHING = {
    "peft_type", "peft_version", "auto_mapping", "revision", "megatron_core", "qalora_group_size", "runtime_config",
    "ensure_weight_tying",
}  # fmt: skip
"""Keys of PEFT's files that change nothing here, whatever they hold."""
_OTHER_METHODS = {
    "fan_in_fan_out", "lora_bias", "target_parameters", "trainable_token_indices", "layer_replication",
    "megatron_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
    "monteclora_config", "kasa_config", "arrow_config", "alora_invocation_tokens", "use_qalora", "use_bdlora",
}  # fmt: skip
"""Keys of PEFT's files that, where they are set, ask for what we don't have."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """y = W x + scaling * B A dropout(x), with A [r, in] and B [out, r] to be trained and W frozen."""

    r: int = 8
    """Rank of the products B A."""
    lora_alpha: float = 8
    """scaling = lora_alpha / r."""
    lora_dropout: float = 0.0
    """Share of x that is dropped at random in training, for each adapted module anew."""
    target_modules: str | list[str] | None = None
    """Names or ends of names ("q_proj", "layers.0.mlp.up_proj"), a regular expression for whole names, or "all-linear":
    all but the head. None: q_proj and v_proj."""
    exclude_modules: str | list[str] | None = None
    """Names, ends of names, or a regular expression: not these."""
    layers_to_transform: int | list[int] | None = None
    """Only layers with these numbers, where target_modules is a list."""
    layers_pattern: str | list[str] | None = None
    """Name of the list of layers that they count in; None: the first number in a name."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """r of the modules whose name ends in what a regular expression matches; the first that does counts."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """lora_alpha of such modules."""
    use_rslora: bool = False
    """scaling = lora_alpha / sqrt(r) (arXiv 2312.03732)."""
    init_lora_weights: bool | str = True
    """A uniform within 1/sqrt(in) ("gaussian": normal, standard deviation 1/r) and B zero; False: B like A."""
    bias: str = "none"
    """Biases to train; only "none"."""
    modules_to_save: list[str] | None = None
    """Modules to train as a whole; none are possible."""
    use_dora: bool = False
    """Only False."""
    task_type: str | None = None
    """Written to the file for PEFT; nothing here depends on it."""
    inference_mode: bool = False
    """The adapter is not to be trained."""
    base_model_name_or_path: str | None = None
    """The model that it was trained for; said in the file, not checked."""

    def __post_init__(self) -> None:
        for name in ("target_modules", "exclude_modules", "modules_to_save"):
            value = getattr(self, name)
            if isinstance(value, (set, tuple)):
                object.__setattr__(self, name, sorted(value))
        for name in ("rank_pattern", "alpha_pattern"):
            object.__setattr__(self, name, dict(getattr(self, name) or {}))
        _check_numbers(self)
        _check_refused(self)
        if isinstance(self.target_modules, str) and self.layers_to_transform is not None:
            layers, remedy = self.layers_to_transform, "Write the layers into the regular expression."
            raise bad_argument("layers_to_transform", layers, "None beside a regular expression", remedy)
        if self.layers_pattern and self.layers_to_transform is None:
            raise bad_argument("layers_pattern", self.layers_pattern, "None without layers_to_transform")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LoraConfig":
        """From what adapter_config.json holds.

        Raises:
            ValueError: it is another method's, or asks for what is not possible here.
        """
        kind = values.get("peft_type")
        if kind != "LORA":
            raise bad_argument("peft_type", kind, "'LORA'", "Merge other kinds into the model with PEFT.")
        known = {f.name for f in fields(cls)}
        asked = {k: v for k, v in values.items() if k not in known | _SAYS_NOTHING and v not in (None, False, {}, [])}
        refused = sorted(set(asked) & _OTHER_METHODS)
        if refused:
            raise ValueError(f"adapter_config.json sets {refused}, which is not possible here: merge it with PEFT.")
        if asked:
            notice(f"adapter_config.json has keys that are not understood and left out: {sorted(asked)}.")
        return cls(**{k: v for k, v in values.items() if k in known})

    def to_dict(self) -> dict[str, Any]:
        """What adapter_config.json holds."""
        return {"peft_type": "LORA", **asdict(self)}


def _check_numbers(config: LoraConfig) -> None:
    for name, rank in {"r": config.r, **config.rank_pattern}.items():
        if type(rank) is not int or rank < 1:
            raise bad_argument(name, rank, "an integer from 1 on")
    for name, alpha in {"lora_alpha": config.lora_alpha, **config.alpha_pattern}.items():
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise bad_argument(name, alpha, "a number")
    if not 0.0 <= config.lora_dropout < 1.0:
        raise bad_argument("lora_dropout", config.lora_dropout, "a number from 0 on and below 1")


def _check_refused(config: LoraConfig) -> None:
    if config.bias != "none":
        remedy = "Biases of the base would change, and every other adapter with them."
        raise bad_argument("bias", config.bias, "'none'", remedy)
    if config.modules_to_save:
        remedy = "Name linear layers in target_modules instead."
        raise bad_argument("modules_to_save", config.modules_to_save, "None", remedy)
    if config.use_dora:
        remedy = "Its norms need each merged weight at every step."
        raise bad_argument("use_dora", config.use_dora, "False", remedy)
    if config.init_lora_weights not in (True, False, "gaussian"):
        remedy = "The others change the base's weights, or need data."
        raise bad_argument("init_lora_weights", config.init_lora_weights, "True, False or 'gaussian'", remedy)
