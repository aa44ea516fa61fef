"""Adapters into the weights and out of them."""

import torch
from torch import Tensor, nn

from cuformers.adapters.layer import LoraLinear, lora_layers
from cuformers.adapters.state import AdapterState
from cuformers.base.errors import bad_argument


def merge(model: nn.Module, state: AdapterState, names: tuple[str, ...], *, keep: bool) -> None:
    """Adds adapters to the weights, in float32, rounded once. Nothing is computed beside the weights then.

    Args:
        keep: the weights before are kept on the CPU, for `unmerge`.

    Raises:
        ValueError: some are merged already; a weight is used elsewhere too; values that are not finite. All weights
            are as before then.
    """
    if state.merged:
        raise ValueError(f"{list(state.merged)} are merged already: call unmerge_adapter() first.")
    layers = {path: layer for path, layer in lora_layers(model).items() if any(n in layer.scaling for n in names)}
    _check(model, layers, names)
    with torch.no_grad():
        for path, layer in layers.items():
            if keep:
                state.before[path] = layer.weight.to("cpu", copy=True)
            layer.weight.copy_(_sum(layer, names))
    state.merged, state.version = names, state.version + 1


def unmerge(model: nn.Module, state: AdapterState) -> None:
    """Gives the layers the weights that they had, bit by bit."""
    if not state.merged:
        raise ValueError("no adapter is merged: merge_adapter() comes first.")
    layers = lora_layers(model)
    with torch.no_grad():
        for path, weight in state.before.items():
            layers[path].weight.copy_(weight)
    state.before.clear()
    state.merged, state.version = (), state.version + 1


def _sum(layer: LoraLinear, names: tuple[str, ...]) -> Tensor:
    deltas = [layer.delta(name) for name in names if name in layer.scaling]
    total = deltas[0] if len(deltas) == 1 else torch.stack(deltas).sum(0)
    return total.add_(layer.weight)


def _check(model: nn.Module, layers: dict[str, LoraLinear], names: tuple[str, ...]) -> None:
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    for path, layer in layers.items():
        if len(users[id(layer.weight)]) > 1:
            raise ValueError(
                f"{path} can't be merged: its weight is {' and '.join(users[id(layer.weight)])} at once, which would "
                "all change. Leave the adapter as it is, or load the model with tie_word_embeddings=False."
            )
        for name in (name for name in names if name in layer.scaling):
            if not all(factor.isfinite().all() for factor in (layer.lora_A[name], layer.lora_B[name])):
                raise bad_argument(f"{path} of adapter {name}", "nan or inf", "finite values")
