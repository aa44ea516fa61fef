"""TrainerState and TrainerControl: where a training stands, and what a callback wants of it. No torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from cuformers.base.errors import CheckpointError
from cuformers.checkpoint.atomic import json_bytes
from cuformers.train.arguments import TrainingArguments


@dataclass
class TrainerState:
    """Where a training stands; trainer_state.json, with Transformers' names."""

    epoch: float = 0
    """Passes over the data so far."""
    global_step: int = 0
    """Optimizer steps so far, skipped ones too."""
    max_steps: int = 0
    """Optimizer steps in all."""
    logging_steps: int = 500
    """Steps from log to log."""
    eval_steps: int | None = None
    """Steps from evaluation to evaluation."""
    save_steps: int = 500
    """Steps from checkpoint to checkpoint."""
    train_batch_size: int | None = None
    """Examples of one forward and backward pass."""
    num_train_epochs: int = 0
    """Passes over the data in all, the last perhaps in part."""
    num_input_tokens_seen: int = 0
    """Not counted: always 0."""
    total_flos: float = 0
    """Not counted: always 0."""
    log_history: list[dict[str, float]] = field(default_factory=list)
    """All that was logged, each with its step."""
    best_metric: float | None = None
    """The best evaluation's value."""
    best_global_step: int | None = None
    """Its step."""
    best_model_checkpoint: str | None = None
    """Its checkpoint, where there is one."""
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)
    """What stateful callbacks know, by the name of their class."""

    def set_intervals(self, args: TrainingArguments, max_steps: int) -> None:
        """Resolves intervals given as shares of all steps."""
        self.max_steps = max_steps
        for name in ("logging_steps", "eval_steps", "save_steps"):
            every = getattr(args, name)
            setattr(self, name, every and (math.ceil(max_steps * every) if every < 1 else int(every)))

    def save_to_json(self, json_path: str | Path) -> None:
        """Writes all fields."""
        Path(json_path).write_bytes(self.to_json())

    def to_json(self) -> bytes:
        """All fields as JSON. NaN and infinities have no JSON: as strings."""
        return json_bytes(_plain({f.name: getattr(self, f.name) for f in fields(self)}))

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> Self:
        """Reads what `save_to_json` or Transformers wrote.

        Raises:
            CheckpointError: no such JSON.
        """
        try:
            read = json.loads(Path(json_path).read_text(encoding="utf-8"))
            return cls(**{f.name: read[f.name] for f in fields(cls) if f.name in read})
        except (ValueError, TypeError, OSError) as error:
            raise CheckpointError(f"{json_path} can't be read as a trainer's state: {error}") from error


@dataclass
class TrainerControl:
    """Switches that callbacks set; the loop acts on them and sets them back, `should_training_stop` excepted."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
