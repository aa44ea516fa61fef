"""The older spellings of rotary settings, brought to Transformers 5's `rope_parameters`."""

import math
from typing import TYPE_CHECKING, Any

from cuformers.base.errors import bad_argument

if TYPE_CHECKING:
    from cuformers.models.config import ModelConfig

_SCALED = ("llama3", "yarn", "longrope")


def normalise_rope(config: "ModelConfig") -> dict[str, Any]:
    """One dict with rope_type and rope_theta, from `rope_parameters` or from the older keys left in `config.extra`.

    Takes rope_theta, rope_scaling and partial_rotary_factor out of `config.extra`.
    """
    old = {k: config.extra.pop(k, None) for k in ("rope_theta", "rope_scaling", "partial_rotary_factor")}
    given = old["rope_scaling"] or config.rope_parameters or {}
    if not isinstance(given, dict):
        raise bad_argument("rope_parameters", given, "a dict with rope_type and rope_theta", "Check config.json.")
    nested = given and all(v is None or isinstance(v, dict) for v in given.values())
    if nested:
        return {kind: _one(config, dict(v), old) for kind, v in given.items() if v is not None}
    return _one(config, dict(given), old)


def _one(config: "ModelConfig", rope: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    rope["rope_theta"] = float(rope.get("rope_theta") or old["rope_theta"] or config.default_theta)
    if rope.get("partial_rotary_factor") is None and old["partial_rotary_factor"] is not None:
        rope["partial_rotary_factor"] = old["partial_rotary_factor"]
    if rope["rope_type"] in _SCALED:
        outer = getattr(config, "original_max_position_embeddings", None)
        inner = rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = outer or inner or config.max_position_embeddings
    for name, value in rope.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise bad_argument(f"rope_parameters[{name!r}]", value, "a finite number", "Check config.json.")
    return rope
