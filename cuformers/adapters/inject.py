"""Adapters into a model, chosen among, and out of it. Everything is checked before anything is changed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from cuformers.adapters.config import LoraConfig
from cuformers.adapters.layer import LoraLinear, lora_layers
from cuformers.adapters.state import AdapterState
from cuformers.adapters.targets import Target, find_targets, short_names
from cuformers.base.errors import CheckpointError, bad_argument


def add_adapter(
    model: nn.Module,
    state: AdapterState,
    config: LoraConfig,
    name: str,
    *,
    targets: Mapping[str, Target] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    autocast: bool = True,
) -> None:
    """Gives a model one more adapter, and makes it the active one. All weights of the model are frozen.

    Args:
        targets: what is adapted; None: what the config means.
        tensors: values of A and B, by the names "MODULE.lora_A" and "MODULE.lora_B"; None: they are initialised.
        autocast: A and B are kept in float32 where the weights have 16 bits; else in the weights' dtype.

    Raises:
        ValueError: the name is taken or impossible, adapters are merged, or the config does not fit the model.
    """
    check_name(state, name)
    _check_not_merged(state, "add an adapter")
    if not isinstance(config, LoraConfig):
        raise bad_argument("config", type(config), "a cuformers.LoraConfig")
    targets = find_targets(model, config) if targets is None else targets
    if any(target.module.weight.is_meta for target in targets.values()):
        raise ValueError("the model is on the meta device: load it before it gets adapters.")
    for path, target in targets.items():
        layer = _adaptable(model, path, target.module, state)
        layer.add(name, target, config, _dtype(layer.weight, autocast))
        if tensors is not None:
            _fill(layer, name, path, tensors)
    state.configs[name] = replace(
        config, target_modules=short_names(model, targets), layers_to_transform=None, layers_pattern=None
    )
    for parameter_name, parameter in model.named_parameters():
        if ".lora_" not in parameter_name:
            parameter.requires_grad_(False)
    activate(model, state, (name,))


def refill(model: nn.Module, state: AdapterState, read: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Gives the adapters that a model has other values, for each adapter by the names that `add_adapter` takes.

    Raises:
        CheckpointError: values that are another adapter's; nothing was changed then.
    """
    _check_not_merged(state, "fill its adapters")
    layers = lora_layers(model)
    for name, tensors in read.items():
        have = {
            f"{path}.{kind}": factors[name].shape
            for path, layer in layers.items() if name in layer.scaling
            for kind, factors in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
        }  # fmt: skip
        if have != {key: tensor.shape for key, tensor in tensors.items()}:
            raise CheckpointError(f"the saved adapter {name!r} has other modules, or another rank, than the model's.")
    for name, tensors in read.items():
        for path, layer in layers.items():
            if name in layer.scaling:
                _fill(layer, name, path, tensors)
    state.version += 1


def _fill(layer: LoraLinear, name: str, path: str, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        layer.lora_A[name].copy_(tensors[f"{path}.lora_A"])
        layer.lora_B[name].copy_(tensors[f"{path}.lora_B"])


def check_name(state: AdapterState, name: str) -> None:
    """Raises ValueError for a name that an adapter can't have, or has."""
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise bad_argument("adapter_name", name, "letters, digits, _ and -")
    if hasattr(nn.ParameterDict(), name):
        raise bad_argument("adapter_name", name, "no attribute of a torch.nn.ParameterDict")
    if name in state.configs:
        remedy = "delete_adapter comes first, or take another name."
        raise bad_argument("adapter_name", name, f"a name besides {sorted(state.configs)}", remedy)


def known(state: AdapterState, names: str | Sequence[str]) -> tuple[str, ...]:
    """Names of adapters as a tuple; raises ValueError where the model has not all of them, or one comes twice."""
    found = (names,) if isinstance(names, str) else tuple(names)
    if not found or len(set(found)) != len(found) or not set(found) <= set(state.configs):
        raise bad_argument("adapter_name", names, f"one or several of {sorted(state.configs)}, each once")
    return found


def activate(model: nn.Module, state: AdapterState, names: tuple[str, ...]) -> None:
    """Makes these the active adapters. They are trained, unless their config says inference_mode; no others are."""
    _check_not_merged(state, "change the active adapter")
    state.active, state.version = names, state.version + 1
    trained = {name for name in names if not state.configs[name].inference_mode}
    for layer in lora_layers(model).values():
        for factors in (layer.lora_A, layer.lora_B):
            for name, parameter in factors.items():
                parameter.requires_grad_(name in trained)


def enable(state: AdapterState, on: bool) -> None:
    """Whether the active adapters count."""
    _check_not_merged(state, "enable or disable adapters")
    state.enabled, state.version = on, state.version + 1


def delete_adapter(model: nn.Module, state: AdapterState, name: str) -> None:
    """Takes an adapter out; if it was the only active one, none is active."""
    known(state, name)
    _check_not_merged(state, "delete an adapter")
    for path, layer in lora_layers(model).items():
        if name in layer.scaling:
            layer.remove(name)
        if not layer.scaling:
            model.set_submodule(path, layer.plain())
    del state.configs[name]
    activate(model, state, tuple(one for one in state.active if one != name))


def unload(model: nn.Module, state: AdapterState) -> None:
    """Takes all adapters out; what is merged stays in the weights."""
    for path, layer in lora_layers(model).items():
        model.set_submodule(path, layer.plain())
    state.configs.clear()
    state.before.clear()
    state.active, state.merged, state.enabled, state.version = (), (), True, state.version + 1


def _adaptable(model: nn.Module, path: str, module: nn.Linear, state: AdapterState) -> LoraLinear:
    if isinstance(module, LoraLinear):
        return module
    layer = LoraLinear(module, state)
    model.set_submodule(path, layer)
    return layer


def _dtype(weight: Tensor, autocast: bool) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32) if autocast else weight.dtype


def _check_not_merged(state: AdapterState, what: str) -> None:
    if state.merged:
        raise ValueError(f"can't {what} while {list(state.merged)} are merged: call unmerge_adapter() first.")
