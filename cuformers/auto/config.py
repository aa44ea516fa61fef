"""AutoConfig: the configuration of a checkpoint, by its `model_type`."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from cuformers.base.errors import CheckpointError, bad_argument
from cuformers.checkpoint.json_file import read_json
from cuformers.checkpoint.resolve import resolve_file
from cuformers.models.base_config import HARMLESS, BaseConfig
from cuformers.models.registry import find
from cuformers.models.rope_config import override_rope

Name = str | Path
OLDER_NAMES = frozenset({"torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"})
"""Keys of older config.json files that are read into newer fields."""
NOT_DONE = frozenset({
    "model_type", "output_attentions", "output_hidden_states", "gradient_checkpointing", "is_encoder_decoder",
    "add_cross_attention", "tie_encoder_decoder", "resid_pdrop", "embd_pdrop", "chunk_size_feed_forward", "auto_map",
})  # fmt: skip
"""Keys that are harmless in a file, and refused from a user who asks for what they mean."""


class AutoConfig:
    """Makes the right configuration object; it is never instantiated itself."""

    def __init__(self) -> None:
        raise TypeError(
            "AutoConfig is made with AutoConfig.from_pretrained(name_or_path) or AutoConfig.for_model(type)."
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Name,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: Name | None = None,
        local_files_only: bool = False,
        subfolder: str = "",
        trust_remote_code: bool = False,
        **overrides: Any,
    ) -> BaseConfig:
        """Reads config.json of a local folder or a hub id.

        Args:
            overrides: values of the configuration that replace the file's.

        Raises:
            CheckpointError: no config.json, or one that can't be read.
            ValueError: an architecture that we don't have, or a value that is not possible.
        """
        refuse_remote_code(trust_remote_code)
        file = resolve_file(
            pretrained_model_name_or_path,
            "config.json",
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            subfolder=subfolder,
        )
        if file is None:
            raise CheckpointError(f"{pretrained_model_name_or_path} has no config.json: it is no model folder.")
        return config_from_dict(read_json(file), overrides)

    @classmethod
    def for_model(cls, model_type: str, **values: Any) -> BaseConfig:
        """A configuration of an architecture, with defaults where no value is given."""
        return config_from_dict({"model_type": model_type}, values)


def config_from_dict(raw: dict[str, Any], overrides: dict[str, Any]) -> BaseConfig:
    """The configuration object for what config.json holds, with some values replaced."""
    spec = find(raw.get("model_type"))
    quantized = raw.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        remedy = "Take one in bfloat16, float16 or float32."
        raise ValueError(f"the checkpoint is quantized ({method}): quantized checkpoints can't be loaded yet. {remedy}")
    known = {f.name for f in fields(spec.config)} - {"extra"}
    unknown = sorted(set(overrides) - known - OLDER_NAMES - HARMLESS - spec.config.harmless)
    if unknown:
        raise ValueError(f"unknown arguments {unknown}: a {spec.model_type} configuration has {sorted(known)}.")
    asked = sorted(name for name in NOT_DONE if overrides.get(name))
    if asked:
        raise bad_argument(asked[0], overrides[asked[0]], "nothing, or a value that asks for nothing")
    _refuse_non_finite(raw, "config")
    return spec.config.from_dict({**override_rope(raw, overrides), **overrides})


def _refuse_non_finite(value: Any, name: str) -> None:
    """Python's JSON reader takes NaN and Infinity; no number of a configuration may be one."""
    if isinstance(value, float) and not math.isfinite(value):
        raise bad_argument(name, value, "a finite number", "Check config.json.")
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_non_finite(inner, f"{name}.{key}")
    if isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_non_finite(inner, f"{name}[{index}]")


def refuse_remote_code(trust_remote_code: bool) -> None:
    """Code that comes with a checkpoint is never run."""
    if trust_remote_code:
        raise ValueError("trust_remote_code=True is not possible: cuformers never runs code from a checkpoint.")
