"""An evaluation or a prediction over a data set; predictions leave the device batch by batch."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from cuformers.train.collators import IGNORE
from cuformers.train.data import num_examples

if TYPE_CHECKING:
    from cuformers.train.trainer import Trainer

Arrays = Any
"""A NumPy array, or a tuple of such."""


class EvalPrediction(NamedTuple):
    """What compute_metrics gets, over the whole data set."""

    predictions: Arrays
    """[N, ...]: the model's outputs beside the loss; bfloat16 as float32. Rows of batches are padded with -100."""
    label_ids: Arrays
    """[N, ...]; padded with -100."""


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns."""

    predictions: Arrays
    """As in EvalPrediction; None where only losses were asked for."""
    label_ids: Arrays
    """As in EvalPrediction; None where there are none."""
    metrics: dict[str, float]
    """Their names begin with the prefix."""


def run_evaluation(
    trainer: "Trainer", loader: DataLoader[Any], loss_only: bool, prefix: str, ignore_keys: Sequence[str] | None = None
) -> PredictionOutput:
    """One pass over the data in inference mode, and back to the model's mode."""
    model, before, begin = trainer.model, trainer.model.training, time.perf_counter()
    model.eval()
    losses: list[Tensor] = []
    sizes: list[int] = []
    predictions: list[Arrays] = []
    labels: list[Arrays] = []
    try:
        for batch in loader:
            loss, outputs, targets = trainer.prediction_step(model, batch, loss_only, ignore_keys)
            sizes.append(_rows(batch))
            if loss is not None:
                losses.append(loss)
            if outputs is not None:
                if trainer.preprocess_logits_for_metrics is not None:
                    outputs = trainer.preprocess_logits_for_metrics(outputs, targets)
                predictions.append(_to_host(outputs))
            if targets is not None and not loss_only:
                labels.append(_to_host(targets))
            trainer.tell("on_prediction_step")
    finally:
        model.train(before)
    all_predictions, all_labels = _joined(predictions), _joined(labels)
    metrics: dict[str, Any] = {}
    if trainer.compute_metrics is not None and all_predictions is not None and all_labels is not None:
        metrics = _plain(trainer.compute_metrics(EvalPrediction(all_predictions, all_labels)))
    if losses:
        metrics[f"{prefix}_loss"] = _weighted(losses, sizes)
    metrics = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
    count = num_examples(loader) or sum(sizes)
    metrics |= speed(prefix, time.perf_counter() - begin, count, -(-count // trainer.args.eval_batch_size))
    return PredictionOutput(all_predictions, all_labels, metrics)


def speed(prefix: str, seconds: float, samples: float, steps: int) -> dict[str, float]:
    """Transformers' entries of how fast it went."""
    seconds = max(seconds, 1e-9)
    return {
        f"{prefix}_runtime": round(seconds, 4),
        f"{prefix}_samples_per_second": round(samples / seconds, 3),
        f"{prefix}_steps_per_second": round(steps / seconds, 3),
    }


@runtime_checkable
class Named(Protocol):
    """A model's outputs by name."""

    def items(self) -> Iterable[tuple[str, Any]]: ...


def outputs_beside_loss(outputs: Any, ignore_keys: Sequence[str] | None) -> Any:
    """What a model returned beside the loss and what is to be ignored: one tensor, or a tuple of several."""
    ignored = {"loss", *(("past_key_values",) if ignore_keys is None else ignore_keys)}
    if isinstance(outputs, Named):
        kept = tuple(value for name, value in outputs.items() if name not in ignored)
    else:
        kept = tuple(outputs[1:])
    return kept[0] if len(kept) == 1 else kept


def _rows(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), 1)


def _weighted(losses: Sequence[Tensor], sizes: Sequence[int]) -> float:
    """The mean over examples of the means of batches, as Transformers has it."""
    stacked = torch.stack([loss.float() for loss in losses]).cpu().double()
    weights = torch.tensor(sizes, dtype=torch.float64)
    return float((stacked * weights).sum() / weights.sum())


def _to_host(value: Any) -> Arrays:
    if isinstance(value, list | tuple):
        return tuple(_to_host(one) for one in value)
    tensor = value.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def _joined(batches: Sequence[Arrays]) -> Arrays:
    """All batches along dim 0; rows of differing lengths are padded at their end."""
    if not batches:
        return None
    if isinstance(batches[0], tuple):
        return tuple(_joined([batch[i] for batch in batches]) for i in range(len(batches[0])))
    if batches[0].ndim < 2:
        return numpy.concatenate([numpy.atleast_1d(batch) for batch in batches])
    rows, width = sum(len(batch) for batch in batches), max(batch.shape[1] for batch in batches)
    joined = numpy.full((rows, width, *batches[0].shape[2:]), IGNORE, dtype=batches[0].dtype)
    at = 0
    for batch in batches:
        joined[at : at + len(batch), : batch.shape[1]] = batch
        at += len(batch)
    return joined


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Without NumPy's and torch's types of single numbers."""
    return {name: v.item() if isinstance(v, numpy.generic | Tensor) else v for name, v in metrics.items()}
