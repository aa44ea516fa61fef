"""The generation options of a text pipeline: the user's, the checkpoint's, and Transformers' defaults for pipelines."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cuformers.generation.config import FIELDS, GenerationConfig

DEFAULTS: Mapping[str, Any] = {"max_new_tokens": 256, "do_sample": True, "temperature": 0.7}
"""Transformers 5.17's, where neither the user nor the checkpoint says anything."""
_GLOBAL_MAX_LENGTH = 20  # written into many checkpoints' files by older versions: says nothing


class Start(NamedTuple):
    """What a pipeline begins with."""

    config: GenerationConfig
    """All options that are set."""
    filled: frozenset[str]
    """Names whose value comes from DEFAULTS."""


def start_config(
    user: GenerationConfig | None, model: GenerationConfig, options: Mapping[str, Any], pad: int | None
) -> Start:
    """Options by name, then the user's config, then the checkpoint's, then DEFAULTS.

    Args:
        user: generation_config of the pipeline's making; it stays as it is.
        model: the checkpoint's.
        options: fields of GenerationConfig by name.
        pad: the tokenizer's pad token, for where no other is known.

    Raises:
        ValueError: an unknown option or a bad value.
    """
    own = {} if user is None else user.to_diff_dict()
    known = {k: v for k, v in {**model.to_diff_dict(), **own}.items() if k in FIELDS}
    extra = {**model.extra, **(user.extra if user is not None else {})}
    config = GenerationConfig.from_parts(known, extra)
    config.update(**options)
    said = {**own, **options}
    has_length = said.get("max_length") is not None or config.max_length not in (None, _GLOBAL_MAX_LENGTH)
    filled = {n for n in DEFAULTS if config.get(n) is None and n not in said}
    filled -= {"max_new_tokens"} if has_length else set()
    config.update(**{name: DEFAULTS[name] for name in filled})
    if config.pad_token_id is None:
        config.pad_token_id = pad
    return Start(config, frozenset(filled))


def call_config(
    config: GenerationConfig, model: GenerationConfig, options: Mapping[str, Any], filled: frozenset[str]
) -> GenerationConfig:
    """What to pass to `generate` beside a call's options: only what the checkpoint does not say by itself.

    A default makes room for what the call says: max_length for max_new_tokens, greedy decoding for the temperature.

    Args:
        config: the pipeline's.
        model: the checkpoint's.
        options: of the call, by name.
        filled: names in `config` that are there by default.
    """
    said = {k: v for k, v in options.items() if v is not None}
    idle = {"max_new_tokens"} if "max_length" in said else set()
    if not said.get("do_sample", config.do_sample):
        idle.add("temperature")
    idle = {name for name in idle & filled if config.get(name) == DEFAULTS[name]}
    known = {n: v for n in FIELDS if (v := config.get(n)) is not None and v != model.get(n) and n not in idle}
    extra = {k: v for k, v in config.extra.items() if k not in model.extra or model.extra[k] != v}
    return GenerationConfig.from_parts(known, extra)
