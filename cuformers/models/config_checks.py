"""What a configuration must hold beside the right types: values that would compute nonsense, or fail deep inside."""

from dataclasses import fields
from typing import TYPE_CHECKING

from cuformers.base.errors import bad_argument

if TYPE_CHECKING:
    from cuformers.models.base_config import BaseConfig

FULL, SLIDING = "full_attention", "sliding_attention"

_POSITIVE = ("num_", "_size", "_dim", "_embeddings", "_window", "_softcapping", "_interval", "_scalar", "_scaling")
"""How the names of numbers above 0 begin (the first) or end."""
_NOT_NEGATIVE = ("norm_eps", "initializer_range", "max_window_layers", "_dropout", "_dropout_prob")
"""How the names of numbers from 0 on end."""


def check_config(config: "BaseConfig") -> None:
    """Raises ValueError for the first value with which no model can be built."""
    check_numbers(config)
    _check_layers(config)
    for name, rope in config.ropes.items():  # making them checks their parameters
        assert rope.dim > 0, name


def check_numbers(config: "BaseConfig") -> None:
    """Raises ValueError for the first number that is out of its range."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        positive = f.name.startswith(_POSITIVE[0]) or f.name.endswith(_POSITIVE[1:])
        if positive and value <= 0:
            raise bad_argument(f"config.{f.name}", value, "a number above 0", "Check config.json.")
        if f.name.endswith(_NOT_NEGATIVE) and value < 0:
            raise bad_argument(f"config.{f.name}", value, "0 or a number above it", "Check config.json.")


def _check_layers(config: "BaseConfig") -> None:
    for name in ("no_rope_layers", "layer_types"):
        given = getattr(config, name, None)
        if given is None:
            continue
        allowed = (FULL, SLIDING) if name == "layer_types" else (0, 1)
        if len(given) != config.num_hidden_layers:
            raise bad_argument(
                f"len(config.{name})", len(given), f"num_hidden_layers={config.num_hidden_layers}", "Change both."
            )
        odd = next((v for v in given if v not in allowed), None)
        if odd is not None:
            raise bad_argument(f"config.{name}", odd, f"a list of {allowed[0]!r} and {allowed[1]!r}")
