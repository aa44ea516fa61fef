"""Numbers and events beside Transformers' Trainer: the same model, data and order, in float32 on the CPU."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

pytest.importorskip("accelerate")  # which Transformers needs for its Trainer

from cuformers import Trainer, TrainerCallback
from cuformers.train.callbacks import EVENTS
from tests.train import tiny


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_llama(tmp_path_factory.mktemp("llama"))


def both(llama: Path, folder: Path, parts: dict[str, Any] | None = None, **options: Any) -> tuple[Trainer, Any]:
    """Our Trainer and theirs, both without shuffling."""
    usual = dict(
        use_cpu=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
        train_sampling_strategy="sequential",
    )
    options = {**usual, **options}
    data = (tiny.pad, tiny.examples(27), tiny.examples(7, 1))
    mine = Trainer(tiny.ours(llama), tiny.arguments(folder / "ours", **options), *data, **(parts or {}))
    args = transformers.TrainingArguments(str(folder / "theirs"), disable_tqdm=True, **options)
    return mine, transformers.Trainer(tiny.theirs(llama), args, *data, **(parts or {}))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("accumulated", [1, 4])
def test_loss_curves_are_equal(llama: Path, tmp_path: Path, accumulated: int, schedule: str) -> None:
    options = dict(max_steps=20, gradient_accumulation_steps=accumulated, warmup_steps=3, lr_scheduler_type=schedule)
    mine, reference = both(llama, tmp_path, **options)
    mine.train()
    reference.train()
    steps = [entry for entry in reference.state.log_history if "loss" in entry]
    assert len(steps) == 20
    for entry, other in zip([e for e in mine.state.log_history if "loss" in e], steps, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "epoch", "step"):
            assert entry[name] == pytest.approx(other[name], rel=1e-5, abs=1e-9), (name, entry, other)
    weights = dict(reference.model.named_parameters())
    for name, parameter in mine.model.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=1e-3, atol=2e-4)


def test_an_evaluation_is_equal(llama: Path, tmp_path: Path) -> None:
    seen: list[tuple[Any, Any]] = []

    def metrics(given: Any) -> dict[str, Any]:
        predictions, labels = given
        seen.append((predictions, labels))
        wanted = labels[:, 1:] != -100
        return {"accuracy": numpy.mean(predictions.argmax(-1)[:, :-1][wanted] == labels[:, 1:][wanted])}

    mine, reference = both(llama, tmp_path, {"compute_metrics": metrics})
    here, there = mine.evaluate(), reference.evaluate()
    assert {*there} - {"eval_model_preparation_time"} == {*here}
    assert here["eval_loss"] == pytest.approx(there["eval_loss"], rel=1e-5)
    assert here["eval_accuracy"] == there["eval_accuracy"]
    (predictions, labels), (others, wanted) = seen
    real = labels != -100
    assert predictions.shape == others.shape and (labels == wanted).all()
    numpy.testing.assert_allclose(predictions[real], others[real], atol=1e-4)
    assert mine.predict(tiny.examples(5, 2)).metrics["test_loss"] == pytest.approx(
        reference.predict(tiny.examples(5, 2)).metrics["test_loss"], rel=1e-5
    )


def recorder(base: type) -> tuple[Any, list[str]]:
    """A callback that notes each event with the step and the switches."""
    events: list[str] = []

    def note(event: str) -> Any:
        def told(self: Any, args: Any, state: Any, control: Any, **parts: Any) -> None:
            switches = [name for name, value in vars(control).items() if value]
            events.append(f"{event} {state.global_step} {state.epoch} {switches}")

        return told

    return type("Recorder", (base,), {event: note(event) for event in EVENTS}), events


@pytest.mark.parametrize(
    "options",
    [
        dict(max_steps=5, gradient_accumulation_steps=3, eval_strategy="steps", eval_steps=2, save_strategy="steps"),
        dict(num_train_epochs=1.5, eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch"),
        dict(num_train_epochs=2, gradient_accumulation_steps=4, save_steps=0.2, save_strategy="steps"),
        dict(max_steps=3, eval_on_start=True, eval_strategy="steps", eval_delay=2, eval_steps=1, logging_steps=2),
        dict(num_train_epochs=1, eval_strategy="epoch", save_strategy="best", metric_for_best_model="loss"),
    ],
    ids=["steps", "epochs", "shares", "start", "best"],
)
def test_events_come_in_the_same_order(llama: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    mine, reference = both(llama, tmp_path, **options)
    here, ours = recorder(TrainerCallback)
    there, wanted = recorder(transformers.TrainerCallback)
    mine.add_callback(here)
    reference.add_callback(there)
    mine.train()
    reference.train()
    assert ours == wanted
    saved = sorted(path.name for path in (tmp_path / "ours").glob("checkpoint-*"))
    assert saved == sorted(path.name for path in (tmp_path / "theirs").glob("checkpoint-*"))


def test_early_stopping_stops_at_the_same_step(llama: Path, tmp_path: Path) -> None:
    options = dict(
        max_steps=20, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, learning_rate=0.1,
        load_best_model_at_end=True,
    )  # fmt: skip
    mine, reference = both(llama, tmp_path, **options)
    from cuformers import EarlyStoppingCallback

    mine.add_callback(EarlyStoppingCallback(2))
    reference.add_callback(transformers.EarlyStoppingCallback(2))
    assert mine.train().global_step == reference.train().global_step < 20
    assert mine.state.best_global_step == reference.state.best_global_step
    assert mine.evaluate()["eval_loss"] == pytest.approx(mine.state.best_metric)
