"""Callbacks: what is told to them and when, and the ones that every training has. No torch."""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.train.arguments import TrainingArguments
from cuformers.train.state import TrainerControl, TrainerState

EVENTS = (
    "on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin",
    "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_prediction_step", "on_evaluate",
    "on_predict", "on_save", "on_log",
)  # fmt: skip
_RESETS = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
    "on_log": ("should_log",),
}
"""Switches that are set back before an event is told."""


class TrainerCallback:
    """Base of callbacks: override what you want to be told.

    Each method gets the arguments, the state, the control, and by name model, processing_class, optimizer,
    lr_scheduler, train_dataloader and eval_dataloader; on_log also logs, on_evaluate and on_predict metrics. It may
    set switches of the control, and may return another one.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The Trainer is made."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Training starts."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Training is over."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A pass over the data starts."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A pass over the data is over."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The first batch of an optimizer step is next."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A batch is done that is not the last of its optimizer step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Gradients are clipped, the optimizer is next."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The optimizer is done, gradients are still there."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An optimizer step is done."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A batch of an evaluation is done."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An evaluation is done."""

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A prediction is done."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A checkpoint is complete."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Something was logged."""


@runtime_checkable
class Stateful(Protocol):
    """A callback whose state a checkpoint keeps: {"args": {...}, "attributes": {...}}, as in Transformers."""

    def state(self) -> dict[str, Any]: ...


class CallbackHandler:
    """Tells events to callbacks, in their order."""

    def __init__(self, callbacks: Iterable[TrainerCallback | type[TrainerCallback]]) -> None:
        self.callbacks: list[TrainerCallback] = []
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Appends a callback, or one made of a class."""
        made = callback() if isinstance(callback, type) else callback
        missing = [event for event in EVENTS if not callable(getattr(made, event, None))]
        if missing:
            raise bad_argument("callbacks", callback, "TrainerCallback objects or classes")
        self.callbacks.append(made)

    def pop(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Takes out a callback, or the first of a class; None where there is none."""
        for mine in self.callbacks:
            if mine is callback or (isinstance(callback, type) and type(mine) is callback):
                self.callbacks.remove(mine)
                return mine
        return None

    def tell(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> TrainerControl:
        """Tells one event; returns the control that came of it."""
        for switch in _RESETS.get(event, ()):
            setattr(control, switch, False)
        for callback in self.callbacks:
            control = getattr(callback, event)(args, state, control, **parts) or control
        return control

    def states(self) -> dict[str, Any]:
        """What stateful callbacks know, by the name of their class; a list where there are several of one."""
        found: dict[str, Any] = {}
        for callback in self.callbacks:
            if isinstance(callback, Stateful):
                found.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: states[0] if len(states) == 1 else states for name, states in found.items()}

    def restore(self, states: dict[str, Any]) -> None:
        """Gives stateful callbacks back what they knew."""
        left = {name: list(one) if isinstance(one, list) else [one] for name, one in states.items()}
        for callback in self.callbacks:
            mine = left.get(type(callback).__name__)
            if isinstance(callback, Stateful) and mine:
                saved = mine.pop(0)
                for name, value in {**saved.get("args", {}), **saved.get("attributes", {})}.items():
                    setattr(callback, name, value)


class DefaultFlowCallback(TrainerCallback):
    """Sets the control's switches as the arguments say."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, last = state.global_step, state.global_step >= state.max_steps
        if (step == 1 and args.logging_first_step) or _due(args.logging_strategy, step, state.logging_steps):
            control.should_log = True
        if args.eval_strategy == "steps" and args.eval_delay <= step and (last or step % state.eval_steps == 0):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (last or step % state.save_steps == 0):
            control.should_save = True
        if last:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True


def _due(strategy: str, step: int, every: int) -> bool:
    return strategy == "steps" and step % every == 0


class PrinterCallback(TrainerCallback):
    """Says what was logged, a line each."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in kwargs["logs"].items())
        notice(f"step {state.global_step}: {', '.join(shown)}")


class EarlyStoppingCallback(TrainerCallback):
    """Stops after `early_stopping_patience` evaluations in a row that were not better by more than the threshold.

    It acts on every evaluation, saved or not, and needs args.metric_for_best_model and an eval_strategy.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold or 0.0
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.metric_for_best_model is None:
            raise bad_argument("metric_for_best_model", None, "a metric's name with EarlyStoppingCallback", "'loss'?")
        if args.eval_strategy == "no":
            raise bad_argument("eval_strategy", "no", "'steps' or 'epoch' with EarlyStoppingCallback")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        value, best = kwargs["metrics"].get(metric_key(args)), state.best_metric
        if value is None:  # one of several data sets
            return
        better = best is None or (value > best if args.greater_is_better else value < best)
        if better and (best is None or abs(value - best) > self.early_stopping_threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        options = ("early_stopping_patience", "early_stopping_threshold")
        counter = "early_stopping_patience_counter"
        return {"args": {n: getattr(self, n) for n in options}, "attributes": {counter: getattr(self, counter)}}


def metric_key(args: TrainingArguments) -> str:
    """The name, in an evaluation's metrics, of the one that says which is best."""
    name = args.metric_for_best_model or "loss"
    return name if name.startswith("eval_") else f"eval_{name}"
