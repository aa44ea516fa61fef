"""The older spellings of rotary settings, brought to Transformers 5's `rope_parameters`."""

from dataclasses import fields
from typing import Any, ClassVar, Protocol

from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.nn.rope import RopeSpec, is_number

_SCALED = ("llama3", "yarn", "longrope")
_KNOWN = {f.name for f in fields(RopeSpec)} | {"partial_rotary_factor"}


class Rotates(Protocol):
    """What is read of a configuration with rotary embeddings."""

    default_theta: ClassVar[float]
    rope_parameters: dict[str, Any] | None
    max_position_embeddings: int
    extra: dict[str, Any]


def rope_spec(parameters: dict[str, Any], head_dim: int, max_position_embeddings: int) -> RopeSpec:
    """One dict of rope_parameters as a RopeSpec.

    Raises:
        ValueError: a partial_rotary_factor that is none, or values that RopeSpec refuses.
    """
    known = {f.name for f in fields(RopeSpec)} - {"dim", "max_position_embeddings"}
    values: dict[str, Any] = {k: v for k, v in parameters.items() if k in known}
    values |= {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
    share = parameters.get("partial_rotary_factor")
    share = 1.0 if share is None else share
    if not is_number(share) or not 0 < share <= 1:
        raise bad_argument("rope_parameters['partial_rotary_factor']", share, "a number above 0, up to 1")
    return RopeSpec(dim=int(head_dim * share), max_position_embeddings=max_position_embeddings, **values)


def normalise_rope(config: Rotates) -> dict[str, Any]:
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


def _one(config: Rotates, rope: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    theta = next((v for v in (rope.get("rope_theta"), old["rope_theta"]) if v is not None), config.default_theta)
    if not is_number(theta) or theta <= 0:
        raise bad_argument("rope_parameters['rope_theta']", theta, "a number above 0", "Check config.json.")
    rope["rope_theta"] = float(theta)
    if rope.get("partial_rotary_factor") is None and old["partial_rotary_factor"] is not None:
        rope["partial_rotary_factor"] = old["partial_rotary_factor"]
    if rope["rope_type"] in _SCALED:
        outer = getattr(config, "original_max_position_embeddings", None)
        inner = rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = outer or inner or config.max_position_embeddings
    unknown = sorted(set(rope) - _KNOWN)
    if unknown:
        notice(f"rope_parameters without meaning, kept but not used: {', '.join(unknown)}", once=True)
    return rope


def override_rope(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`raw`, a config.json, without the rotary settings that `overrides` replaces, whichever spelling either uses."""
    raw = dict(raw)
    if "rope_parameters" in overrides or "rope_scaling" in overrides:
        replaced = [raw.pop(key, None) for key in ("rope_parameters", "rope_scaling")]
        thetas = [one["rope_theta"] for one in replaced if isinstance(one, dict) and "rope_theta" in one]
        raw |= {"rope_theta": thetas[0]} if thetas else {}
    for key in ("rope_parameters", "rope_scaling"):
        given = raw.get(key)
        if not isinstance(given, dict):
            continue
        single = next(
            (k for k in ("rope_theta", "rope_local_base_freq", "partial_rotary_factor") if k in overrides), ""
        )
        if single and any(isinstance(v, dict) for v in given.values()):
            remedy = "Give rope_parameters: the checkpoint has one set for each kind of layer."
            raise bad_argument(single, overrides[single], "nothing", remedy)
        raw[key] = {k: v for k, v in given.items() if k not in overrides}
    return raw
