"""Trainer: Transformers' interface to a training."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from cuformers.base import env
from cuformers.base.errors import CheckpointError, bad_argument
from cuformers.base.seeding import set_seed
from cuformers.train import loss as losses
from cuformers.train.arguments import TrainingArguments
from cuformers.train.callbacks import CallbackHandler, DefaultFlowCallback, PrinterCallback, TrainerCallback
from cuformers.train.checkpoints import damage, newest
from cuformers.train.collators import Collator, DataCollatorWithPadding, Padder, default_data_collator
from cuformers.train.data import KnownColumns, make_loader, to_device
from cuformers.train.evaluation import EvalPrediction, PredictionOutput, outputs_beside_loss, run_evaluation
from cuformers.train.loop import Run, TrainOutput
from cuformers.train.optimizer import make_adamw
from cuformers.train.resume import ARGS, save_model, write_json
from cuformers.train.schedule import get_scheduler
from cuformers.train.state import TrainerControl, TrainerState

Dataset = Any
"""Indexed examples with a length (a list, a torch Dataset, one of the package datasets), or an IterableDataset."""


@runtime_checkable
class SavesFiles(Protocol):
    """A tokenizer or processor that writes its own files."""

    def save_pretrained(self, save_directory: str | Path) -> Any: ...


@runtime_checkable
class _Pads(Protocol):
    def pad(self, encoded_inputs: Any, **options: Any) -> Any: ...


class Trainer:
    """Trains and evaluates a model; override a method to change what it does.

    Args:
        model: returns a loss where its batch has labels, as an attribute, a key or the first of a tuple.
        args: None means the defaults.
        data_collator: from a list of examples to a batch; None pads with processing_class where that is a tokenizer,
            else stacks.
        train_dataset, eval_dataset: see Dataset; eval_dataset may be a dict of several.
        processing_class: the tokenizer or processor, saved beside the model.
        compute_loss_func: (outputs, labels, num_items_in_batch) -> loss; it divides a sum by num_items_in_batch, the
            labels that count in all batches of an optimizer step.
        compute_metrics: EvalPrediction -> dict of numbers.
        callbacks: TrainerCallback objects or classes, told after the built-in ones.
        optimizers: (optimizer, scheduler) of the caller's own; None for each that is to be made.
        preprocess_logits_for_metrics: (outputs, labels) -> what is kept of a batch for compute_metrics.

    Raises:
        ValueError: several processes were started, or the model can't be trained as asked.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        data_collator: Collator | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: Any = None,
        *,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise bad_argument("model", model, "a model", "AutoModelForCausalLM.from_pretrained(name) makes one.")
        self.args = TrainingArguments() if args is None else args
        self.args.validate()
        _check_alone()
        _check_dtypes(model, self.args, optimizers[0])
        set_seed(self.args.seed)
        self.model = model
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, processing_class
        self.data_collator = data_collator or _default_collator(processing_class)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.given = optimizers
        """The caller's own optimizer and schedule."""
        self.optimizer, self.lr_scheduler = optimizers
        self.state, self.control = TrainerState(), TrainerControl()
        self.callbacks = CallbackHandler([DefaultFlowCallback, *(callbacks or ()), PrinterCallback])
        self.loss_share: Tensor | float = 1.0
        """What the mean loss of the present batch weighs in its optimizer step."""
        self.loss_divided = False
        """Whether the present batch's loss was divided by num_items_in_batch already."""
        self._to_its_device()
        self.tell("on_init_end")

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """Trains, from the model as it is or from a checkpoint; the model is in its former mode afterwards.

        Args:
            resume_from_checkpoint: a folder checkpoint-N; True takes the newest complete one of args.output_dir.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model.
            FloatingPointError: a loss or gradient is not finite (see args.nan_policy); the weights are those before.
            ValueError: there is nothing to train on, or the arguments differ from the checkpoint's where they must not.
        """
        if self.train_dataset is None and type(self).get_train_dataloader is Trainer.get_train_dataloader:
            raise bad_argument("train_dataset", None, "a data set", "Pass it to Trainer.")
        folder = self._checkpoint(resume_from_checkpoint)
        set_seed(self.args.seed)
        return Run(self, folder).run()

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The metrics of a data set, or of each of several, and logs them; `eval_loss` where there are labels."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            found: dict[str, float] = {}
            for name, one in dataset.items():
                found |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        loader = self.get_eval_dataloader(dataset)
        loss_only = self.compute_metrics is None or self.args.prediction_loss_only
        metrics = run_evaluation(self, loader, loss_only, metric_key_prefix, ignore_keys).metrics
        self.log(metrics)
        self.tell("on_evaluate", metrics=metrics)
        return metrics

    def predict(
        self, test_dataset: Dataset, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """The model's outputs for a data set, on the host, and metrics where it has labels."""
        loader = self.get_test_dataloader(test_dataset)
        output = run_evaluation(self, loader, self.args.prediction_loss_only, metric_key_prefix, ignore_keys)
        self.tell("on_predict", metrics=output.metrics)
        return output

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Writes the model, its tokenizer or processor, and the arguments; default args.output_dir."""
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.model, folder)
        if isinstance(self.processing_class, SavesFiles):
            self.processing_class.save_pretrained(folder)
        write_json(folder / ARGS, self.args.to_dict())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the epoch, keeps them in state.log_history, and tells callbacks."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.tell("on_log", logs=logs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The loss of a batch, divided by num_items_in_batch where that is given and the model or function does so.

        The loss of an override is taken for the mean of its batch, unless it hands num_items_in_batch to the model.
        """
        func, labels = self.compute_loss_func, None
        if func is not None:
            inputs = dict(inputs)
            labels = inputs.pop("labels", None)
        elif num_items_in_batch is not None and losses.names(model, "num_items_in_batch"):
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        if func is not None:
            loss = func(outputs, labels, num_items_in_batch=num_items_in_batch)
            self.loss_divided = num_items_in_batch is not None
        else:
            loss = outputs[0] if isinstance(outputs, tuple) else outputs.get("loss")
        if loss is None:
            raise ValueError(f"the model returned no loss for {sorted(inputs)}: give its examples labels.")
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Forward and backward of one batch; its share of the step's loss, float32."""
        if not model.training:
            model.train()
        self.loss_divided = False
        loss = self.compute_loss(model, to_device(inputs, self.args.device), num_items_in_batch=num_items_in_batch)
        if not self.loss_divided:
            loss = loss * self.loss_share
        loss.backward()
        return loss.detach().float()

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """(loss, outputs beside it, labels) of one batch of an evaluation; None for what there is not."""
        names = self.args.labels
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        count = losses.count_labels(inputs, names, shifted=losses.shifts_labels(model))
        inputs = to_device(inputs, self.args.device)
        loss_only = prediction_loss_only and has_labels and self.compute_loss_func is None
        if loss_only and losses.names(model, "skip_logits"):
            inputs = {**inputs, "skip_logits": True}
        with torch.no_grad():
            if not has_labels:
                outputs, loss = model(**inputs), None
            else:
                items = None if count is None else count.clamp(min=1).to(self.args.device, non_blocking=True)
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=items)
                loss = loss.detach().mean()
        if prediction_loss_only:
            return loss, None, None
        labels = tuple(inputs[name] for name in names) if has_labels else None
        outputs = outputs if isinstance(outputs, Tensor) else _beside(outputs, has_labels, ignore_keys)
        return loss, outputs, labels[0] if labels is not None and len(labels) == 1 else labels

    def create_optimizer(self) -> Optimizer:
        """The optimizer of a training, where the caller gave none."""
        return make_adamw(self.model, self.args)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer) -> Any:
        """The schedule of a training, where the caller gave none."""
        args = self.args
        warmup = args.get_warmup_steps(num_training_steps)
        return get_scheduler(args.lr_scheduler_type, optimizer, warmup, num_training_steps, args.lr_scheduler_kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches of the training data."""
        shuffle = self.args.train_sampling_strategy == "random"
        return self._loader(self.train_dataset, self.args.train_batch_size, shuffle)

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader[Any]:
        """Batches of an evaluation's data, in their own order."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise bad_argument("eval_dataset", None, "a data set", "Pass it to Trainer, or to evaluate.")
        return self._loader(dataset, self.args.eval_batch_size, False)

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader[Any]:
        """Batches of a prediction's data, in their own order."""
        return self._loader(test_dataset, self.args.eval_batch_size, False)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Tells one more callback."""
        self.callbacks.add(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Tells a callback, or the first of a class, no more; returns it."""
        return self.callbacks.pop(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Tells a callback, or the first of a class, no more."""
        self.callbacks.pop(callback)

    def tell(self, event: str, **more: Any) -> None:
        """Tells callbacks an event."""
        parts = {"model": self.model, "processing_class": self.processing_class, "optimizer": self.optimizer}
        parts |= {"lr_scheduler": self.lr_scheduler, "train_dataloader": None, "eval_dataloader": None}
        self.control = self.callbacks.tell(event, self.args, self.state, self.control, **{**parts, **more})

    def _loader(self, dataset: Dataset, batch_size: int, shuffle: bool) -> DataLoader[Any]:
        collate = self.data_collator
        if self.args.remove_unused_columns:
            collate = KnownColumns(collate, self.model, self.args.labels)
        return make_loader(dataset, self.args, collate, batch_size, shuffle=shuffle)

    def _checkpoint(self, wanted: str | Path | bool | None) -> Path | None:
        if wanted is None or wanted is False:
            return None
        if wanted is True:
            return newest(Path(str(self.args.output_dir)))
        folder = Path(wanted)
        reason = damage(folder)
        if reason is not None:
            raise CheckpointError(f"{folder} can't be resumed from: {reason}.")
        return folder

    def _to_its_device(self) -> None:
        first = next(self.model.parameters(), None)
        if first is not None and first.device != self.args.device:
            self.model.to(self.args.device)


def _beside(outputs: Any, has_loss: bool, ignore_keys: Sequence[str] | None) -> Any:
    if isinstance(outputs, tuple) and not has_loss:
        outputs = (None, *outputs)
    return outputs_beside_loss(outputs, ignore_keys)


def _default_collator(processing_class: Any) -> Collator:
    if isinstance(processing_class, _Pads):
        tokenizer: Padder = processing_class  # pyright: ignore[reportAssignmentType]
        return DataCollatorWithPadding(tokenizer)
    return default_data_collator


def _check_alone() -> None:
    started = env.get("WORLD_SIZE") or "1"
    if started != "1":
        raise bad_argument("WORLD_SIZE", started, "1", "Trainer runs in one process: start the program with python.")


def _check_dtypes(model: nn.Module, args: TrainingArguments, optimizer: Optimizer | None) -> None:
    if args.bf16 and optimizer is not None:
        remedy = "The float32 weights are its own optimizer's. Train in the model's dtype, or without optimizers."
        raise bad_argument("bf16", True, "False with an optimizer of the caller's", remedy)
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if torch.float16 in dtypes and not args.bf16:
        remedy = "Float16 weights lose small updates: load the model with dtype='float32', or set bf16=True."
        raise bad_argument("model.dtype", torch.float16, "float32 or bfloat16 for training", remedy)


