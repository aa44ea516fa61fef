"""A checkpoint's weights into a model: everything is checked first, then streamed to where the model lies."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from cuformers.base.errors import CheckpointError
from cuformers.base.log import progress as progress_bar
from cuformers.checkpoint.index import Index
from cuformers.checkpoint.plan import Plan, plan_load
from cuformers.checkpoint.stream import same_bytes, stream_copies
from cuformers.checkpoint.weight_map import IDENTITY, WeightMap


class LoadReport(NamedTuple):
    """What a load did."""

    num_tensors: int
    """Tensors read from the files."""
    nbytes: int
    """Bytes read from the files."""
    seconds: float
    """From the first check to the last byte in place."""
    missing: tuple[str, ...]
    """Allowed to miss, and not touched: still to be initialised by the caller."""
    unexpected: tuple[str, ...]
    """Allowed, and not read."""

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)


def load_weights(
    model: nn.Module,
    index: Index,
    weight_map: WeightMap = IDENTITY,
    *,
    ignore_missing: Iterable[str] = (),
    ignore_unexpected: Iterable[str] = (),
    progress: bool = True,
) -> LoadReport:
    """Fills the model's parameters and persistent buffers, wherever they lie and of whatever plain float dtype.

    The ignore lists are shell patterns on names: of the module for missing ones, of the file for unexpected ones.
    Raises CheckpointError before anything is copied where names, shapes or dtypes do not fit (all faults in one
    message), or where the model ties what the file holds as two different tensors.
    """
    begin = time.perf_counter()
    plan = plan_load(model, index, weight_map, ignore_missing, ignore_unexpected)
    _check_twins(plan)
    with progress_bar("Loading weights", plan.nbytes, in_bytes=True, show=None if progress else False) as bar:
        stream_copies(plan.copies, advance=bar.advance)
    return LoadReport(
        num_tensors=len({copy.entry.name for copy in plan.copies}),
        nbytes=plan.nbytes,
        seconds=time.perf_counter() - begin,
        missing=plan.missing,
        unexpected=plan.unexpected,
    )


def _check_twins(plan: Plan) -> None:
    for first, second in plan.twins:
        if not same_bytes(first, second):
            raise CheckpointError(
                f"The model ties {first.entry.name!r} and {second.entry.name!r}, but the checkpoint in "
                f"{first.entry.file.parent} holds two different tensors for them. Set tie_word_embeddings to false in "
                "its config.json, or pass it to from_pretrained, to load both."
            )
