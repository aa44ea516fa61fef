"""Learning rates over a training, by Transformers' names and formulas: factors of the highest rate."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cuformers.base.errors import bad_argument

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

Factor = Callable[[int], float]
"""From the number of steps done to the factor of the next one's rate."""


def _warm(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def _share(step: int, warmup: int, total: int) -> float:
    """How much of the time after the warmup is over, from 0."""
    return (step - warmup) / max(1, total - warmup)


def linear(warmup: int, total: int, rate: float) -> Factor:
    """Falls to 0 at the end."""
    return lambda step: _warm(step, warmup) if step < warmup else max(0.0, (total - step) / max(1, total - warmup))


def cosine(warmup: int, total: int, rate: float, num_cycles: float = 0.5) -> Factor:
    """Falls to 0 as a cosine; num_cycles are its waves."""

    def factor(step: int) -> float:
        if step < warmup:
            return _warm(step, warmup)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * _share(step, warmup, total))))

    return factor


def cosine_with_restarts(warmup: int, total: int, rate: float, num_cycles: int = 1) -> Factor:
    """Falls to 0 as a half cosine, num_cycles times."""

    def factor(step: int) -> float:
        if step < warmup:
            return _warm(step, warmup)
        share = _share(step, warmup, total)
        return 0.0 if share >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * share) % 1.0))))

    return factor


def cosine_with_min_lr(
    warmup: int,
    total: int,
    rate: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Factor:
    """A cosine down to the rate min_lr, or to the share min_lr_rate of the highest."""
    if (min_lr is None) == (min_lr_rate is None):
        raise bad_argument("lr_scheduler_kwargs", {"min_lr": min_lr, "min_lr_rate": min_lr_rate}, "one of the two")
    low = min_lr_rate if min_lr_rate is not None else (min_lr or 0.0) / rate
    full = cosine(0, max(1, total - warmup), rate, num_cycles)
    return lambda step: _warm(step, warmup) if step < warmup else max(0.0, full(step - warmup) * (1 - low) + low)


def polynomial(warmup: int, total: int, rate: float, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    """Falls to the rate lr_end as a power of the time that is left."""
    if rate <= lr_end:
        raise bad_argument("lr_scheduler_kwargs", {"lr_end": lr_end}, f"an lr_end below learning_rate={rate}")

    def factor(step: int) -> float:
        if step < warmup:
            return _warm(step, warmup)
        if step > total:
            return lr_end / rate
        return ((rate - lr_end) * (1 - _share(step, warmup, total)) ** power + lr_end) / rate

    return factor


def inverse_sqrt(warmup: int, total: int, rate: float, timescale: int | None = None) -> Factor:
    """Falls with the square root of the steps; timescale are the steps to a fall by sqrt(2), default the warmup."""
    scale = timescale or warmup or 10_000
    return lambda step: _warm(step, warmup) if step < warmup else 1.0 / math.sqrt((step + scale - warmup) / scale)


def constant(warmup: int, total: int, rate: float) -> Factor:
    """The highest rate from the first step to the last."""
    return lambda step: 1.0


def constant_with_warmup(warmup: int, total: int, rate: float) -> Factor:
    """Rises to the highest rate and stays there."""
    return lambda step: step / max(1.0, warmup) if step < warmup else 1.0


SCHEDULES: Mapping[str, Callable[..., Factor]] = {
    f.__name__: f
    for f in (
        linear, cosine, cosine_with_restarts, cosine_with_min_lr, polynomial, inverse_sqrt, constant,
        constant_with_warmup,
    )
}  # fmt: skip


def get_scheduler(
    name: str,
    optimizer: "Optimizer",
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: Mapping[str, Any] | None = None,
) -> "LambdaLR":
    """A schedule as PyTorch's scheduler, to step once after each optimizer step.

    Args:
        name: one of SCHEDULES.
        num_warmup_steps, num_training_steps: optimizer steps; the first rise to the highest rate, the optimizer's own.
        scheduler_specific_kwargs: further options of the schedule.

    Raises:
        ValueError: an unknown name or option, or a number of steps that the schedule needs and that is not given.
    """
    from torch.optim.lr_scheduler import LambdaLR

    name = getattr(name, "value", name)
    if name not in SCHEDULES:
        raise bad_argument("lr_scheduler_type", name, f"one of {sorted(SCHEDULES)}")
    if num_training_steps is None and name not in ("constant", "constant_with_warmup", "inverse_sqrt"):
        raise bad_argument("num_training_steps", None, f"the number of optimizer steps, which {name!r} needs")
    options = dict(scheduler_specific_kwargs or {})
    try:
        rate = optimizer.param_groups[0]["lr"]
        factor = SCHEDULES[name](num_warmup_steps or 0, num_training_steps or 0, rate, **options)
    except TypeError as error:
        raise bad_argument("lr_scheduler_kwargs", options, f"options of {name!r} ({error})") from None
    return LambdaLR(optimizer, factor)
