"""TrainingArguments: how a Trainer trains, with Transformers' names and defaults."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuformers.base.log import notice
from cuformers.train.argument_checks import check_values
from cuformers.train.refused import REFUSED, check_refused

if TYPE_CHECKING:
    import torch


@dataclass(init=False)
class TrainingArguments:
    """Options of a `Trainer`.

    Fields of Transformers' TrainingArguments that are not here are accepted at their default and refused otherwise
    (refused.py has the reasons). Unlike other configs here it is mutable, because programs write
    `args.learning_rate = ...`; every way of setting a field checks its name, and `validate()` checks the values.

    Raises:
        ValueError: an unknown option, or a value that is not possible.
    """

    output_dir: str | None = None
    """Where checkpoints go; default "trainer_output"."""
    per_device_train_batch_size: int = 8
    """Examples of one forward and backward pass."""
    per_device_eval_batch_size: int = 8
    """Examples of one step of an evaluation."""
    gradient_accumulation_steps: int = 1
    """Batches whose gradients make one optimizer step."""
    num_train_epochs: float = 3.0
    """Passes over the data; the last may be a part of one."""
    max_steps: int = -1
    """Optimizer steps in place of num_train_epochs, where positive."""
    learning_rate: float = 5e-5
    """The highest rate of the schedule."""
    lr_scheduler_type: str = "linear"
    """Shape of the schedule: one of schedule.py's."""
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    """Further options of the schedule: num_cycles, min_lr, min_lr_rate, power, lr_end, timescale."""
    warmup_steps: float = 0
    """Steps in which the rate rises from 0; below 1 it is a share of all steps."""
    optim: str = "adamw_torch_fused"
    """"adamw_torch_fused" or "adamw_torch"; pass any other optimizer as Trainer(optimizers=...)."""
    weight_decay: float = 0.0
    """AdamW's, on all parameters but biases and those of norms."""
    adam_beta1: float = 0.9
    """AdamW's share of the first moment that is kept."""
    adam_beta2: float = 0.999
    """AdamW's share of the second moment that is kept."""
    adam_epsilon: float = 1e-8
    """AdamW's smallest divisor."""
    max_grad_norm: float = 1.0
    """Longer gradients are scaled down to this norm; 0 leaves them alone."""
    nan_policy: str = "stop"
    """What becomes of a step whose loss or gradient is not finite, which never reaches the optimizer: "stop" raises
    FloatingPointError, "skip" goes on without it. Not an option of Transformers."""
    bf16: bool = False
    """The model is cast to bfloat16, and the optimizer keeps and updates a float32 copy of its weights; gradients are
    added up in float32."""
    use_cpu: bool = False
    """Trains on the CPU even where there is a GPU."""
    seed: int = 42
    """Of the process, set when the Trainer is made and when training starts."""
    data_seed: int | None = None
    """Of the order of the data; None takes seed."""
    train_sampling_strategy: str = "random"
    """"random": a new order each epoch; "sequential": the data's own."""
    dataloader_drop_last: bool = False
    """Leaves out a last batch that is not full."""
    dataloader_num_workers: int = 0
    """Processes that read the data; 0 reads in this one."""
    dataloader_pin_memory: bool = True
    """Batches for a GPU go through page-locked memory."""
    dataloader_persistent_workers: bool = False
    """Keeps those processes between epochs."""
    dataloader_prefetch_factor: int | None = None
    """Batches that each of them reads ahead."""
    dataloader_multiprocessing_context: str | None = None
    """How they start: "fork", "spawn" or "forkserver"."""
    remove_unused_columns: bool = True
    """Leaves out what the model's forward has no argument for."""
    label_names: list[str] | None = None
    """Keys of a batch that are labels; None means ["labels"]."""
    logging_strategy: str = "steps"
    """When to log: "no", "steps" or "epoch"."""
    logging_steps: float = 500
    """Every so many steps; below 1 it is a share of all steps."""
    logging_first_step: bool = False
    """Logs step 1 too."""
    eval_strategy: str = "no"
    """When to evaluate: "no", "steps" or "epoch"."""
    eval_steps: float | None = None
    """Every so many steps; below 1 it is a share of all steps; None takes logging_steps."""
    eval_delay: float = 0
    """Steps or epochs, as eval_strategy counts, before the first evaluation."""
    eval_on_start: bool = False
    """Evaluates before the first step too."""
    eval_accumulation_steps: int | None = None
    """Predictions leave the GPU after every batch, whatever this says."""
    prediction_loss_only: bool = False
    """An evaluation gives losses alone; without compute_metrics it always does."""
    save_strategy: str = "steps"
    """When to save a checkpoint: "no", "steps", "epoch" or "best" (each evaluation that is better than all before)."""
    save_steps: float = 500
    """Every so many steps; below 1 it is a share of all steps."""
    save_total_limit: int | None = None
    """Most checkpoints to keep; the newest and the best are kept in any case."""
    save_only_model: bool = False
    """Checkpoints hold the weights alone, so that training can't be resumed from them."""
    load_best_model_at_end: bool = False
    """Ends with the weights of the best evaluation. Each new best is saved, whenever evaluations are."""
    metric_for_best_model: str | None = None
    """The metric that says which evaluation is best; None means "loss" where it is needed."""
    greater_is_better: bool | None = None
    """Whether a higher value is better; None means yes, unless the metric's name ends in "loss"."""
    restore_callback_states_from_checkpoint: bool = False
    """A resumed run takes the state of stateful callbacks, such as early stopping, from the checkpoint."""
    resume_from_checkpoint: str | None = None
    """For the program's own use, as in Transformers: pass it to train()."""
    do_train: bool = False
    """For the program's own use, as in Transformers."""
    do_eval: bool = False
    """For the program's own use, as in Transformers; True with an eval_strategy."""
    do_predict: bool = False
    """For the program's own use, as in Transformers."""

    def __init__(self, output_dir: str | Path | None = None, **options: Any) -> None:
        options = {"output_dir": output_dir, **_take_aliases(options)}
        known = {f.name: f.default for f in fields(self)}
        for name in options:
            _check_name(name, known)
        check_refused({name: value for name, value in options.items() if name in REFUSED})
        for name, default in known.items():
            object.__setattr__(self, name, options.get(name, default))
        self._derive()
        self.validate()

    def __setattr__(self, name: str, value: Any) -> None:
        _check_name(name, [f.name for f in fields(self)])
        if name in REFUSED:
            check_refused({name: value})
        object.__setattr__(self, name, value)

    def _derive(self) -> None:
        self.output_dir = str(Path(self.output_dir or "trainer_output").expanduser())
        for name in ("lr_scheduler_type", "optim", "logging_strategy", "eval_strategy", "save_strategy"):
            value = getattr(self, name)
            setattr(self, name, getattr(value, "value", value))  # Transformers' enumerations, and False of YAML
        if self.eval_strategy == "steps" and not self.eval_steps:
            self.eval_steps = self.logging_steps
        self.do_eval = self.do_eval or self.eval_strategy != "no"
        if self.metric_for_best_model is None and (self.load_best_model_at_end or self.save_strategy == "best"):
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    def validate(self) -> None:
        """Raises ValueError for the first value that is not possible."""
        check_values(self)

    @property
    def device(self) -> "torch.device":
        """Where training runs: this process's GPU, or the CPU."""
        import torch

        from cuformers.cuda.device import default_device

        return torch.device("cpu") if self.use_cpu else default_device()

    @property
    def train_batch_size(self) -> int:
        """Examples of one forward and backward pass."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Examples of one step of an evaluation."""
        return self.per_device_eval_batch_size

    @property
    def world_size(self) -> int:
        """Number of processes, always 1."""
        return 1

    @property
    def labels(self) -> list[str]:
        """Keys of a batch that are labels."""
        return ["labels"] if self.label_names is None else list(self.label_names)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps in which the rate rises, of so many steps in all."""
        return int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(num_training_steps * self.warmup_steps)

    def to_dict(self) -> dict[str, Any]:
        """All options, as JSON can hold them."""
        return asdict(self)


_OLDER_NAMES = {"warmup_ratio": "warmup_steps", "evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu"}


def _check_name(name: str, known: Any) -> None:
    if name in known or name in REFUSED:
        return
    near = get_close_matches(name, [*known, *REFUSED], n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else "docs/training.md lists them all."
    raise ValueError(f"TrainingArguments has no option {name!r}. {hint}")


def _take_aliases(options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    for old, new in _OLDER_NAMES.items():
        if old not in options:
            continue
        if new in options:
            raise ValueError(f"{old} is the older name of {new}, which is given too: leave out {old}.")
        notice(f"{old} is the older name of {new}.", once=True)
        options[new] = options.pop(old)
    return options
