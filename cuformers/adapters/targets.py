"""Which modules of a model a LoraConfig means, and with which rank and scaling: PEFT's rules."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from cuformers.adapters.config import ALL_LINEAR, LoraConfig
from cuformers.base.errors import bad_argument
from cuformers.nn.project import has_plain_map

_USUAL = ["q_proj", "v_proj"]


class Target(NamedTuple):
    """One module to adapt."""

    module: nn.Linear
    rank: int
    scaling: float


def find_targets(model: nn.Module, config: LoraConfig, *, all_found: bool = True) -> dict[str, Target]:
    """The modules to adapt, by name, in the model's order.

    Args:
        all_found: each name of a list must be one of the model.

    Raises:
        ValueError: none, names that the model has not, or modules that are no linear maps; all are listed.
    """
    modules = {name: m for name, m in model.named_modules() if name and not isinstance(m, nn.ParameterDict)}
    wanted = _USUAL if config.target_modules is None else config.target_modules
    if wanted == ALL_LINEAR:
        heads = {id(m) for name, m in modules.items() if name == "lm_head"}
        named = [name for name, m in modules.items() if isinstance(m, nn.Linear) and id(m) not in heads]
    else:
        named = [name for name in modules if matches(wanted, name)]
    if all_found and not isinstance(wanted, str):
        unknown = [one for one in wanted if not any(matches([one], name) for name in modules)]
        if unknown:
            raise bad_argument("target_modules", unknown, f"among {_ends(modules)}")
    named = [name for name in named if not matches(config.exclude_modules, name) and _in_layers(config, name)]
    if not named:
        raise bad_argument("target_modules", wanted, f"among {_ends(modules)}", "As it is nothing would be adapted.")
    others = [f"{name} ({type(modules[name]).__name__})" for name in named if not has_plain_map(modules[name])]
    if others:
        raise ValueError(f"target_modules names what is no plain linear layer: {', '.join(others)}.")
    return {name: _target(config, name, modules[name]) for name in named}  # type: ignore[arg-type]


def matches(wanted: str | Iterable[str] | None, name: str) -> bool:
    """Whether a name is one of a list, ends in one after a dot, or is what a regular expression matches."""
    if not wanted:
        return False
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in wanted)


def short_names(model: nn.Module, targets: Mapping[str, Target]) -> list[str]:
    """Names that mean just these modules: their last parts, where no other module has them too."""
    ends = sorted({name.rpartition(".")[2] for name in targets})
    meant = {name for name, m in model.named_modules() if matches(ends, name) and not isinstance(m, nn.ParameterDict)}
    return ends if meant == set(targets) else sorted(targets)


def _in_layers(config: LoraConfig, name: str) -> bool:
    layers = config.layers_to_transform
    if layers is None or layers == []:
        return True
    patterns = [config.layers_pattern] if isinstance(config.layers_pattern, str) else config.layers_pattern
    tries = [rf"(?:^|.*?\.){p}\.(\d+)\." for p in patterns] if patterns else [r".*?\.[^.]*\.(\d+)\.", r"[^.]*\.(\d+)\."]
    found = next((match for one in tries if (match := re.match(one, name))), None)
    return found is not None and int(found[1]) in ([layers] if isinstance(layers, int) else layers)


def _target(config: LoraConfig, name: str, module: nn.Linear) -> Target:
    rank = _of_pattern(config.rank_pattern, name, config.r)
    alpha = _of_pattern(config.alpha_pattern, name, config.lora_alpha)
    return Target(module, int(rank), alpha / (math.sqrt(rank) if config.use_rslora else rank))


def _of_pattern(patterns: Mapping[str, float], name: str, default: float) -> float:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def _ends(modules: Mapping[str, nn.Module]) -> list[str]:
    """What the linear layers are called."""
    return sorted({name.rpartition(".")[2] for name, m in modules.items() if isinstance(m, nn.Linear)})
