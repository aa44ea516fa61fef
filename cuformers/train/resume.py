"""What a checkpoint holds beside the weights: the optimizer, the schedule, random generators, the place in the data."""

import json
import pickle
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

from cuformers.base.errors import CheckpointError
from cuformers.checkpoint.atomic import json_bytes
from cuformers.checkpoint.index import Index
from cuformers.checkpoint.load import load_weights
from cuformers.checkpoint.save import save_weights
from cuformers.checkpoint.weight_map import IDENTITY, WeightMap
from cuformers.cuda.random import rng_states, set_rng_states
from cuformers.train.optimizer import Masters, parameters_of

OPTIMIZER, SCHEDULER, RNG, PROGRESS, ARGS = (
    "optimizer.pt", "scheduler.pt", "rng_state.pth", "progress.json", "training_args.json"
)  # fmt: skip
MASTERS = "master_weights"


@runtime_checkable
class Saves(Protocol):
    """A model that writes its own files, as ours do."""

    @property
    def saved_as(self) -> WeightMap: ...

    def save_pretrained(self, save_directory: str | Path) -> None: ...


@runtime_checkable
class Adapts(Protocol):
    """A model that may have adapters, which are then all that it saves."""

    @property
    def has_adapters(self) -> bool: ...

    def restore_adapters(self, folder: Path) -> None: ...


@dataclass
class Progress:
    """What trainer_state.json has no field for."""

    loss_sum: float = 0.0
    """Losses of the steps since the last log."""
    loss_steps: int = 0
    """How many these are."""
    total_loss: float = 0.0
    """Losses of all steps before."""
    total_steps: int = 0
    """How many these are."""
    epoch: int = 0
    """Number of the pass over the data, from 0."""
    batches_done: int = 0
    """Batches of it that are used up."""
    num_examples: int | None = None
    """Of a pass over the data."""
    num_batches: int | None = None
    """Of a pass over the data."""


def save_model(model: nn.Module, folder: Path) -> None:
    """Writes the weights, and what else the model says about itself."""
    if isinstance(model, Saves):
        model.save_pretrained(folder)
    else:
        save_weights(model.state_dict(), folder)


def load_model(model: nn.Module, folder: Path) -> None:
    """Fills the model from a folder that `save_model` wrote.

    Raises:
        CheckpointError: names, shapes or files that do not fit; nothing was loaded then.
    """
    if isinstance(model, Adapts) and model.has_adapters:
        model.restore_adapters(folder)
        return
    weight_map = model.saved_as if isinstance(model, Saves) else IDENTITY
    load_weights(model, Index.open(folder), weight_map)


def save_training(folder: Path, optimizer: Optimizer, scheduler: Any, masters: Masters | None) -> None:
    """Writes optimizer, schedule and random generators."""
    state: dict[str, Any] = optimizer.state_dict()
    if masters is not None:
        state[MASTERS] = masters.state()
    torch.save(state, folder / OPTIMIZER)
    torch.save(scheduler.state_dict(), folder / SCHEDULER)
    torch.save(_rng(), folder / RNG)


def load_training(folder: Path, optimizer: Optimizer, scheduler: Any, masters: Masters | None) -> None:
    """Reads optimizer and schedule; the generators come last, by `load_rng`.

    Raises:
        CheckpointError: a file is missing, can't be read, or belongs to another training.
    """
    state = _read(folder / OPTIMIZER)
    copies = state.pop(MASTERS, None)
    if (copies is None) != (masters is None):
        raise CheckpointError(f"{folder} was written with bf16={copies is not None}: resume with the same.")
    shapes = [p.shape for p in parameters_of(optimizer)]
    try:
        optimizer.load_state_dict(state)
        if masters is not None:
            masters.restore(copies)
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder / OPTIMIZER} doesn't fit the model's {len(shapes)} tensors: {error}") from error
    scheduler.load_state_dict(_read(folder / SCHEDULER))


def load_rng(folder: Path) -> None:
    """Sets the random generators of this process."""
    state = _read(folder / RNG)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["cpu"])
    set_rng_states(state["cuda"])


def _rng() -> dict[str, Any]:
    name, keys, *rest = numpy.random.get_state()  # pyright: ignore[reportGeneralTypeIssues]
    python = random.getstate()
    return {
        "python": (python[0], list(python[1]), python[2]),
        "numpy": (name, [int(key) for key in keys], *rest),
        "cpu": torch.get_rng_state(),
        "cuda": rng_states(),
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a new file of JSON."""
    path.write_bytes(json_bytes(content))


def save_progress(folder: Path, progress: Progress) -> None:
    """Writes progress.json."""
    write_json(folder / PROGRESS, asdict(progress))


def read_json(path: Path) -> dict[str, Any]:
    """Reads one; empty where the checkpoint has none, as one of Transformers."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        remedy = "it was saved with save_only_model=True, or by another program"
        raise CheckpointError(f"{path} is missing, so that training can't be resumed from there: {remedy}.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
