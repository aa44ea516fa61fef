"""Which values the options of a training may have. No torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeGuard

from cuformers.base.errors import bad_argument
from cuformers.train.schedule import SCHEDULES

if TYPE_CHECKING:
    from cuformers.train.arguments import TrainingArguments

OPTIMIZERS = ("adamw_torch_fused", "adamw_torch")
EVAL_STRATEGIES = ("no", "steps", "epoch")
SAVE_STRATEGIES = ("no", "steps", "epoch", "best")
SAMPLING = ("random", "sequential")
NAN_POLICIES = ("stop", "skip")


def check_values(args: "TrainingArguments") -> None:
    """Raises ValueError for the first value that is not possible."""
    for name, allowed in _CHOICES.items():
        if getattr(args, name) not in allowed:
            raise bad_argument(name, getattr(args, name), f"one of {sorted(allowed)}")
    for names, kind, fits, allowed in _RANGES:
        for name in names.split():
            value = getattr(args, name)
            if value is None and name in _OPTIONAL:
                continue
            if not _is_number(value, kind) or not fits(value):
                raise bad_argument(name, value, allowed)
    for field in fields(args):
        if field.type in (bool, "bool") and not isinstance(getattr(args, field.name), bool):
            raise bad_argument(field.name, getattr(args, field.name), "True or False")
    _check_evaluations(args)
    _check_workers(args)


def _check_evaluations(args: "TrainingArguments") -> None:
    if args.eval_strategy == "no" and (args.load_best_model_at_end or args.save_strategy == "best"):
        remedy = "The best checkpoint is known from evaluations: eval_strategy='epoch', for example."
        raise bad_argument("eval_strategy", "no", "'steps' or 'epoch' where the best model is wanted", remedy)
    if args.load_best_model_at_end and args.save_strategy == "no":
        remedy = "The best model is loaded from its checkpoint: save_strategy='best' saves nothing else."
        raise bad_argument("save_strategy", "no", "another one with load_best_model_at_end", remedy)


def _check_workers(args: "TrainingArguments") -> None:
    if args.dataloader_num_workers:
        return
    for option in ("persistent_workers", "prefetch_factor", "multiprocessing_context"):
        name = f"dataloader_{option}"
        if getattr(args, name):
            remedy = "There are no workers that it could act on: set dataloader_num_workers."
            raise bad_argument(name, getattr(args, name), "nothing with dataloader_num_workers=0", remedy)


def _is_number(value: Any, kind: Any) -> TypeGuard[float]:
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: float) -> bool:
    return value > 0


def _not_negative(value: float) -> bool:
    return value >= 0


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "lr_scheduler_type": tuple(SCHEDULES),
    "optim": OPTIMIZERS,
    "logging_strategy": EVAL_STRATEGIES,
    "eval_strategy": EVAL_STRATEGIES,
    "save_strategy": SAVE_STRATEGIES,
    "train_sampling_strategy": SAMPLING,
    "nan_policy": NAN_POLICIES,
}
_OPTIONAL = (
    "save_total_limit", "eval_accumulation_steps", "dataloader_prefetch_factor", "data_seed", "eval_steps"
)  # fmt: skip
_RANGES: tuple[tuple[str, Any, Callable[[float], bool], str], ...] = (
    (
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps save_total_limit "
        "eval_accumulation_steps dataloader_prefetch_factor",
        int, _positive, "an integer from 1 on",
    ),
    ("seed data_seed", int, lambda v: 0 <= v < 1 << 32, "an integer from 0 to 2**32 - 1"),
    ("dataloader_num_workers", int, _not_negative, "an integer from 0 on"),
    ("max_steps", int, lambda v: v == -1 or v > 0, "-1 or an integer from 1 on"),
    ("num_train_epochs adam_epsilon", (int, float), _positive, "a number above 0"),
    ("learning_rate weight_decay max_grad_norm eval_delay", (int, float), _not_negative, "a number from 0 on"),
    ("adam_beta1 adam_beta2", (int, float), lambda v: 0 <= v < 1, "a number from 0 to below 1"),
    (
        "logging_steps eval_steps save_steps",
        (int, float), lambda v: 0 < v < 1 or (v >= 1 and v == int(v)), "an integer from 1 on, or a share below 1",
    ),
    (
        "warmup_steps",
        (int, float), lambda v: 0 <= v < 1 or (v >= 1 and v == int(v)), "an integer from 0 on, or a share below 1",
    ),
)  # fmt: skip
