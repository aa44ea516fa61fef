"""How many steps and passes over the data a training has. No torch."""

import math
import sys
from typing import NamedTuple

from cuformers.base.errors import bad_argument
from cuformers.train.arguments import TrainingArguments


class Plan(NamedTuple):
    """The length of a training."""

    max_steps: int
    """Optimizer steps."""
    num_epochs: int
    """Passes over the data, the last perhaps in part; sys.maxsize where only reading tells."""
    batches_in_pass: int
    """Batches of a pass; where only reading tells, those of the whole training."""


def plan_steps(args: TrainingArguments, num_examples: int | None, num_batches: int | None) -> Plan:
    """From the sizes of a pass over the data; None where only reading tells.

    Raises:
        ValueError: a pass has no batch, or nothing says when to stop.
    """
    accumulated = args.gradient_accumulation_steps
    if num_batches is None:
        if args.max_steps < 0:
            raise bad_argument("max_steps", args.max_steps, "the number of steps, as the data has no length")
        return Plan(args.max_steps, sys.maxsize, args.max_steps * accumulated)
    if num_batches == 0:
        remedy = "There are fewer examples than one batch takes, or none."
        raise bad_argument("train_dataset", num_examples, "at least one batch of examples", remedy)
    steps_in_pass = -(-num_batches // accumulated)
    if args.max_steps > 0:
        return Plan(args.max_steps, -(-args.max_steps // steps_in_pass), num_batches)
    return Plan(math.ceil(args.num_train_epochs * steps_in_pass), math.ceil(args.num_train_epochs), num_batches)
