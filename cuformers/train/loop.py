"""One training: passes, optimizer steps, and what happens between them."""

import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.train import loss as losses
from cuformers.train.callbacks import metric_key
from cuformers.train.checkpoints import folder_name, thin_out, write_checkpoint
from cuformers.train.data import batches_from, num_batches, num_examples, to_device
from cuformers.train.evaluation import speed
from cuformers.train.optimizer import Masters, grad_norm
from cuformers.train.plan import plan_steps
from cuformers.train.resume import (
    ARGS,
    PROGRESS,
    Progress,
    load_model,
    load_rng,
    load_training,
    read_json,
    save_progress,
    save_training,
)  # fmt: skip
from cuformers.train.state import TrainerState

if TYPE_CHECKING:
    from cuformers.train.trainer import Trainer

SAME_ORDER = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "train_sampling_strategy",
    "dataloader_drop_last",
)  # fmt: skip
"""Arguments that the place in the data depends on."""


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns."""

    global_step: int
    """Optimizer steps done."""
    training_loss: float
    """Mean over all steps whose loss was finite."""
    metrics: dict[str, float]
    """train_runtime, train_samples_per_second, train_steps_per_second, train_loss, epoch."""


class Run:
    """One call of `Trainer.train`."""

    def __init__(self, trainer: "Trainer", checkpoint: Path | None) -> None:
        self.trainer, self.args, self.checkpoint = trainer, trainer.args, checkpoint
        self.loader = trainer.get_train_dataloader()
        self.progress = Progress(num_examples=num_examples(self.loader), num_batches=num_batches(self.loader))
        self.plan = plan_steps(self.args, self.progress.num_examples, self.progress.num_batches)
        self.folder = Path(str(self.args.output_dir))
        self.masters: Masters | None = None
        self.norm: Tensor | None = None
        self.rate: float | None = None
        self.logged_at = 0

    def run(self) -> TrainOutput:
        """Trains to the end."""
        model = self.trainer.model
        before = model.training
        self._restore_state()
        self._prepare()
        hook = model.register_forward_pre_hook(self._notes_division, with_kwargs=True)
        try:
            return self._run()
        finally:
            hook.remove()
            if self.masters is not None:
                self.masters.close()
            model.zero_grad()
            model.train(before)

    def _run(self) -> TrainOutput:
        trainer, begin = self.trainer, time.perf_counter()
        first_step = trainer.state.global_step
        self.loss = torch.tensor(self.progress.loss_sum, device=self.args.device)
        self.logged_at = trainer.state.global_step - self.progress.loss_steps
        trainer.model.zero_grad()
        trainer.model.train()
        self._tell("on_train_begin")
        if self.args.eval_on_start:
            trainer.evaluate()
        while self.progress.epoch < self.plan.num_epochs and not trainer.control.should_training_stop:
            if trainer.state.global_step >= self.plan.max_steps:
                break
            self._tell("on_epoch_begin")
            self._pass()
            self.progress.epoch, self.progress.batches_done = self.progress.epoch + 1, 0
        return self._finish(time.perf_counter() - begin, first_step)

    def _pass(self) -> None:
        """One pass over the data, or what is left of it."""
        batches = batches_from(self.loader, self.progress.epoch, self.progress.batches_done, self.args.seed)
        control = self.trainer.control
        seen = self.progress.batches_done > 0
        while step := self._next_step(batches):
            self._enter()
            seen = True
            self._step(step)
            control = self.trainer.control
            if control.should_epoch_stop or control.should_training_stop:
                break
        if not seen:
            notice(f"the training data is empty at step {self.trainer.state.global_step}: training stops there.")
            control.should_training_stop = True
        self._tell("on_epoch_end")
        self._log_evaluate_save()

    def _next_step(self, batches: Iterator[Any]) -> list[Any]:
        """The batches of the next optimizer step; fewer at the end of a pass."""
        return list(islice(batches, self.args.gradient_accumulation_steps))

    def _enter(self) -> None:
        """Before the first step of a resumed run: reading data may have drawn numbers."""
        if self.checkpoint is not None:
            load_rng(self.checkpoint)
            self.checkpoint = None

    def _step(self, batches: list[Any]) -> None:
        trainer, state = self.trainer, self.trainer.state
        self._tell("on_step_begin")
        shifted = losses.shifts_labels(trainer.model)
        counts = [losses.count_labels(batch, self.args.labels, shifted=shifted) for batch in batches]
        known = [count for count in counts if count is not None]
        items = torch.stack(known).sum().clamp(min=1) if len(known) == len(counts) else None
        items = to_device(items, self.args.device)
        loss = torch.zeros((), device=self.args.device)
        for number, (batch, share) in enumerate(zip(batches, losses.shares(counts))):
            trainer.loss_share = to_device(share, self.args.device)
            loss += trainer.training_step(trainer.model, batch, items)
            self.progress.batches_done += 1
            if number < len(batches) - 1:
                self._tell("on_substep_end")
        self._update(loss)
        state.global_step += 1
        state.epoch = self.progress.epoch + self.progress.batches_done / self.plan.batches_in_pass
        self._tell("on_step_end")
        self._log_evaluate_save()

    def _update(self, loss: Tensor) -> None:
        """The optimizer's step; not with a loss or a gradient that is not finite."""
        optimizer, scheduler = self.trainer.optimizer, self.trainer.lr_scheduler
        assert optimizer is not None
        norm = grad_norm(optimizer, self.args.max_grad_norm)
        if not bool(torch.isfinite(norm) & torch.isfinite(loss)):  # the one wait for the device in a step
            self._not_finite(float(loss), float(norm))
        else:
            self._tell("on_pre_optimizer_step")
            optimizer.step()
            if self.masters is not None:
                self.masters.publish()
            self._tell("on_optimizer_step")
            self.rate, self.norm = scheduler.get_last_lr()[0], norm
            scheduler.step()
            self.loss += loss
            self.progress.loss_steps += 1
        optimizer.zero_grad()
        self.trainer.model.zero_grad()

    def _not_finite(self, loss: float, norm: float) -> None:
        step = self.trainer.state.global_step + 1
        text = f"step {step} has loss {loss} and gradient norm {norm}; its update was not applied"
        if self.args.nan_policy == "stop":
            raise FloatingPointError(
                f"{text}. Look at its data and at the learning rate, or set nan_policy='skip' to go on without it."
            )
        notice(f"{text} (nan_policy='skip').")

    def _log_evaluate_save(self) -> None:
        trainer, state = self.trainer, self.trainer.state
        if trainer.control.should_log and state.global_step > self.logged_at:
            trainer.log(self._logs())
        if trainer.control.should_evaluate:
            better = self._is_best(trainer.evaluate())
            if self.args.save_strategy == "best":
                trainer.control.should_save = better
            elif better and self.args.load_best_model_at_end:
                trainer.control.should_save = True
        if trainer.control.should_save:
            self._save()
            self._tell("on_save")

    def _logs(self) -> dict[str, float]:
        total, steps = float(self.loss), self.progress.loss_steps
        logs: dict[str, float] = {"loss": total / steps} if steps else {}
        if self.norm is not None:
            logs["grad_norm"] = float(self.norm)
        logs["learning_rate"] = self.rate if self.rate is not None else self.trainer.lr_scheduler.get_last_lr()[0]
        self._close_window(total)
        return logs

    def _close_window(self, total: float) -> None:
        self.progress.total_loss += total
        self.progress.total_steps += self.progress.loss_steps
        self.progress.loss_steps = 0
        self.loss.zero_()
        self.logged_at = self.trainer.state.global_step

    def _is_best(self, metrics: dict[str, float]) -> bool:
        if self.args.metric_for_best_model is None:
            return False
        name, state = metric_key(self.args), self.trainer.state
        if name not in metrics:
            allowed = f"one of {sorted(metrics)}"
            raise bad_argument("metric_for_best_model", self.args.metric_for_best_model, allowed)
        value, best = metrics[name], state.best_metric
        better = not math.isnan(value) and (
            best is None or (value > best if self.args.greater_is_better else value < best)
        )
        if better:
            state.best_metric, state.best_global_step = value, state.global_step
        return better

    def _save(self) -> None:
        trainer, state = self.trainer, self.trainer.state
        optimizer = trainer.optimizer
        assert optimizer is not None
        target = self.folder / folder_name(state.global_step)
        best = self.folder / folder_name(state.best_global_step or 0)
        if state.best_global_step == state.global_step or (state.best_global_step and best.is_dir()):
            state.best_model_checkpoint = str(best)
        self.progress.loss_sum = float(self.loss)
        state.stateful_callbacks = trainer.callbacks.states()

        def write(folder: Path) -> None:
            trainer.save_model(folder)
            if not self.args.save_only_model:
                save_training(folder, optimizer, trainer.lr_scheduler, self.masters)
                save_progress(folder, self.progress)
            state.save_to_json(folder / "trainer_state.json")

        write_checkpoint(self.folder, state.global_step, write, self._nbytes())
        keep = {target, Path(state.best_model_checkpoint)} if state.best_model_checkpoint else {target}
        thin_out(self.folder, self.args.save_total_limit, keep)

    def _nbytes(self) -> int:
        weights = sum(p.nbytes for p in self.trainer.model.parameters())
        if self.args.save_only_model or self.trainer.optimizer is None:
            return weights
        state = self.trainer.optimizer.state.values()
        moments = sum(v.nbytes for entry in state for v in entry.values() if isinstance(v, Tensor))
        copies = sum(copy.nbytes for copy in self.masters.state()) if self.masters is not None else 0
        return weights + moments + copies

    def _finish(self, seconds: float, first_step: int) -> TrainOutput:
        trainer, state = self.trainer, self.trainer.state
        self._close_window(float(self.loss))
        mean = self.progress.total_loss / max(1, self.progress.total_steps)
        steps = state.global_step - first_step
        examples = steps * self.args.train_batch_size * self.args.gradient_accumulation_steps
        metrics = {**speed("train", seconds, examples, steps), "train_loss": mean}
        trainer.log(metrics)
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            load_model(trainer.model, Path(state.best_model_checkpoint))
        self._tell("on_train_end")
        return TrainOutput(state.global_step, mean, metrics)

    def _restore_state(self) -> None:
        trainer = self.trainer
        trainer.state = TrainerState()
        if self.checkpoint is not None:
            trainer.state = TrainerState.load_from_json(self.checkpoint / "trainer_state.json")
            self._check_same(read_json(self.checkpoint / ARGS), read_json(self.checkpoint / PROGRESS))
            if self.args.restore_callback_states_from_checkpoint:
                trainer.callbacks.restore(trainer.state.stateful_callbacks)
            best = trainer.state.best_model_checkpoint
            if best is not None and not Path(best).is_dir():
                notice(f"the best checkpoint, {best}, is gone: it can't be loaded at the end.")
                trainer.state.best_model_checkpoint = None
            load_model(trainer.model, self.checkpoint)
        trainer.state.set_intervals(self.args, self.plan.max_steps)
        trainer.state.train_batch_size = self.args.train_batch_size
        trainer.state.num_train_epochs = self.plan.num_epochs

    def _check_same(self, args: dict[str, Any], progress: dict[str, Any]) -> None:
        for name in SAME_ORDER:
            if name in args and args[name] != getattr(self.args, name):
                remedy = "The place in the data depends on it."
                raise bad_argument(name, getattr(self.args, name), f"{args[name]!r}, as in {self.checkpoint}", remedy)
        if progress:
            now, then = self.progress.num_examples, progress["num_examples"]
            if now != then:
                remedy = "The place in the data depends on it."
                raise bad_argument("train_dataset", f"{now} examples", f"the {then} of {self.checkpoint}", remedy)
            self.progress = Progress(**progress)
        if self.progress.batches_done == self.progress.num_batches:
            self.progress.epoch, self.progress.batches_done = self.progress.epoch + 1, 0

    def _prepare(self) -> None:
        """Optimizer and schedule, those of the caller or new ones."""
        trainer = self.trainer
        trainer.optimizer, trainer.lr_scheduler = trainer.given
        if trainer.optimizer is None:
            trainer.optimizer = trainer.create_optimizer()
        if self.args.bf16:
            trainer.model.to(torch.bfloat16)
            self.masters = Masters(trainer.model, trainer.optimizer)
        if trainer.lr_scheduler is None:
            trainer.lr_scheduler = trainer.create_scheduler(self.plan.max_steps, trainer.optimizer)
        if self.checkpoint is not None:
            load_training(self.checkpoint, trainer.optimizer, trainer.lr_scheduler, self.masters)

    def _notes_division(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("num_items_in_batch") is not None:
            self.trainer.loss_divided = True

    def _tell(self, event: str) -> None:
        self.trainer.tell(event, train_dataloader=self.loader)
