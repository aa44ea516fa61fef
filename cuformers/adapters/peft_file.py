"""PEFT's files: adapter_config.json and adapter_model.safetensors.

A tensor is called base_model.model.MODULE.lora_A.weight [r, in] or .lora_B.weight [out, r], where MODULE is what the
checkpoint calls it; the adapter's name is not in the file (github.com/huggingface/peft, utils/save_and_load.py).
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from cuformers.adapters.config import LoraConfig
from cuformers.adapters.layer import lora_layers
from cuformers.adapters.targets import Target, find_targets
from cuformers.base.errors import CheckpointError
from cuformers.checkpoint.atomic import json_bytes, scratch_folder, sync_folder, write_synced
from cuformers.checkpoint.index import Index
from cuformers.checkpoint.json_file import read_json
from cuformers.checkpoint.save import FileTensor, write_safetensors
from cuformers.checkpoint.stream import read_tensor
from cuformers.checkpoint.weight_map import WeightMap

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG_NAME, WEIGHTS_NAME)
_PREFIX = "base_model.model."
_SPARE_BYTES = 1 << 20  # header and configuration


class AdapterFile(NamedTuple):
    """What a folder holds, checked against a model."""

    config: LoraConfig
    targets: dict[str, Target]
    tensors: dict[str, Tensor]
    """A and B by the names "MODULE.lora_A" and "MODULE.lora_B", on the CPU."""


def save_adapter(model: nn.Module, name: str, config: LoraConfig, folder: str | Path, weight_map: WeightMap) -> None:
    """Writes one adapter of a model, whole or not at all, as PEFT reads it."""
    folder = Path(folder)
    tensors = [
        FileTensor(f"{_stem(path, weight_map)}.{kind}.weight", (factors[name].detach(),))
        for path, layer in lora_layers(model).items()
        for kind, factors in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
        if name in layer.scaling
    ]
    values = replace(config, inference_mode=True).to_dict()
    with scratch_folder(folder, sum(t.nbytes for t in tensors) + _SPARE_BYTES) as scratch:
        write_safetensors(scratch / WEIGHTS_NAME, tensors, {"format": "pt"})
        write_synced(scratch / CONFIG_NAME, json_bytes(values, sort_keys=True))
        (folder / CONFIG_NAME).unlink(missing_ok=True)  # never the old one beside new weights
        for file in (WEIGHTS_NAME, CONFIG_NAME):
            os.replace(scratch / file, folder / file)
        sync_folder(folder)


def read_adapter(model: nn.Module, folder: Path, weight_map: WeightMap) -> AdapterFile:
    """Reads one adapter for a model.

    Raises:
        CheckpointError: files that are missing, corrupt, or for another model; all faults in one message.
        ValueError: another method than LoRA, or options that are not possible here.
    """
    config = LoraConfig.from_dict(read_json(_existing(folder, CONFIG_NAME)))
    entries = Index.of_file(_existing(folder, WEIGHTS_NAME)).entries
    try:
        targets = find_targets(model, config, all_found=False)
    except ValueError as error:
        raise CheckpointError(f"{folder} does not fit the model: {error}") from error
    stems = {path: _stem(path, weight_map) for path in targets}
    shapes = _shapes(targets, stems)
    faults = [f"missing {file}" for file in shapes if file not in entries]
    for file, entry in entries.items():
        if file not in shapes:
            faults.append(f"unexpected {file} {list(entry.shape)}")
        elif entry.shape != shapes[file]:
            faults.append(f"{file} is {list(entry.shape)}, the model needs {list(shapes[file])}")
        elif not entry.dtype.is_floating_point:
            faults.append(f"{file} is {entry.dtype}, which is no float")
    if faults:
        remedy = "It is another model's, or its adapter_config.json another adapter's."
        raise CheckpointError(f"{folder} does not fit the model: {'; '.join(faults)}. {remedy}")
    tensors = {
        f"{path}.{kind}": read_tensor(entries[f"{stem}.{kind}.weight"])
        for path, stem in stems.items()
        for kind in ("lora_A", "lora_B")
    }
    return AdapterFile(config, targets, tensors)


def _stem(path: str, weight_map: WeightMap) -> str:
    """What a module's tensors begin with in the file."""
    (file,) = weight_map.to_file(f"{path}.weight")
    return f"{_PREFIX}{file.removesuffix('.weight')}"


def _shapes(targets: Mapping[str, Target], stems: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """What the file has to hold."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, (module, rank, _) in targets.items():
        shapes[f"{stems[path]}.lora_A.weight"] = (rank, module.in_features)
        shapes[f"{stems[path]}.lora_B.weight"] = (module.out_features, rank)
    return shapes


def _existing(folder: Path, name: str) -> Path:
    file = folder / name
    if not file.is_file():
        found = sorted(p.name for p in folder.iterdir())
        remedy = "Convert .bin files with PEFT: they run code when read." if name == WEIGHTS_NAME else ""
        raise CheckpointError(f"{folder} has no {name}: it has {found}. {remedy}".rstrip())
    return file
