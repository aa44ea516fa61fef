"""What a step's loss is divided by, and steps that aren't finite."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cuformers import Trainer, TrainerCallback, TrainingArguments
from tests.train import tiny

SPLITS = [(8, 1), (1, 8), (2, 4)]
"""(batch, accumulation)"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_llama(tmp_path_factory.mktemp("llama"))


def first_step(model: Any, folder: Path, batch: int, accumulated: int, kind: type[Trainer]) -> tuple[float, float]:
    """(loss, gradient norm) of the first step over the same 8 examples."""
    args = tiny.arguments(
        folder, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated, max_steps=1,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    made = kind(model, args, tiny.pad, tiny.examples(8))
    made.train()
    return made.state.log_history[0]["loss"], made.state.log_history[0]["grad_norm"]


class Means(nn.Module):
    """A model that knows nothing of num_items_in_batch: the mean loss over its batch's labels."""

    def __init__(self, takes_anything: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        if takes_anything:
            self.forward = self.greedy  # type: ignore[method-assign]

    def greedy(self, input_ids: torch.Tensor, labels: torch.Tensor, **unused: Any) -> dict[str, torch.Tensor]:
        return Means.forward(self, input_ids, labels, None)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class OwnLoss(Trainer):
    """An override in the older manner, which passes over num_items_in_batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


@pytest.mark.parametrize("how", ["ours", "ours, own loss", "means", "means, takes anything"])
def test_accumulation_is_one_large_batch(llama: Path, tmp_path: Path, how: str) -> None:
    found = []
    for batch, accumulated in SPLITS:
        model = tiny.ours(llama) if how.startswith("ours") else Means("anything" in how)
        found.append(first_step(model, tmp_path, batch, accumulated, OwnLoss if "own" in how else Trainer))
    for loss, norm in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert norm == pytest.approx(found[0][1], rel=1e-5)


def test_labels_of_padding_are_counted_as_the_model_counts_them(llama: Path, tmp_path: Path) -> None:
    """Rows padded on either side whose labels are the padded tokens: the step's loss is the model's own mean."""
    rows = [
        {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "labels": [5, 6, 7, 0, 0]},
        {"input_ids": [0, 0, 0, 8, 9], "attention_mask": [0, 0, 0, 1, 1], "labels": [0, 0, 0, 8, 9]},
    ]
    model = tiny.ours(llama).train()
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    mean = model(**batch).loss.item()
    for batch_size, accumulated in ((2, 1), (1, 2)):
        options = dict(per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulated, max_steps=1)
        made = Trainer(tiny.ours(llama), tiny.arguments(tmp_path, **options), train_dataset=rows)
        made.train()
        assert made.state.log_history[0]["loss"] == pytest.approx(mean, rel=1e-6)


def test_losses_alone_need_no_logits(llama: Path, tmp_path: Path) -> None:
    model, seen = tiny.ours(llama), []
    made = tiny.trainer(model, tmp_path)
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits))
    made.evaluate()
    assert seen and all(logits is None for logits in seen)


def test_a_loss_function_divides_itself(llama: Path, tmp_path: Path) -> None:
    def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    def step(**parts: Any) -> float:
        options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1)
        made = tiny.trainer(tiny.ours(llama), tmp_path, **options, parts=parts)
        made.train()
        return made.state.log_history[0]["loss"]

    assert step(compute_loss_func=summed) == pytest.approx(step(), rel=1e-6)


def test_a_batch_without_labels_teaches_nothing(llama: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 2
    model = tiny.ours(llama)
    made = Trainer(model, tiny.arguments(tmp_path, max_steps=1, weight_decay=0.0), tiny.pad, rows)
    before = [p.detach().clone() for p in model.parameters()]
    made.train()
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters()))
    assert made.state.log_history[0]["loss"] == 0.0


class Poison(TrainerCallback):
    """Makes one step's gradient NaN or infinite."""

    def __init__(self, step: int, value: float) -> None:
        self.step, self.value, self.handle = step, value, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weight = kwargs["model"].lm_head.weight
        if state.global_step + 1 == self.step:
            self.handle = weight.register_hook(lambda grad: grad * self.value)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_never_reaches_the_optimizer(llama: Path, tmp_path: Path, value: float, bf16: bool) -> None:
    model = tiny.ours(llama)
    made = tiny.trainer(model, tmp_path, max_steps=5, bf16=bf16, parts={"callbacks": [Poison(3, value)]})
    with pytest.raises(FloatingPointError, match=r"step 3.*nan_policy='skip'"):
        made.train()
    two = tiny.ours(llama)
    twin = tiny.trainer(two, tmp_path, max_steps=5, bf16=bf16, parts={"callbacks": [StopAfter(2)]})
    twin.train()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), two.parameters()))
    assert all(p.grad is None for p in model.parameters())


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def test_skipping_goes_on(llama: Path, tmp_path: Path) -> None:
    model = tiny.ours(llama)
    options = dict(max_steps=5, nan_policy="skip", logging_steps=5, lr_scheduler_type="linear")
    made = tiny.trainer(model, tmp_path, **options, parts={"callbacks": [Poison(3, float("nan"))]})
    assert made.train().global_step == 5
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    log = made.state.log_history[0]
    assert 0 < log["loss"] < 10 and log["learning_rate"] == pytest.approx(1e-2 * 2 / 5)


def test_bf16_keeps_float32_weights(llama: Path, tmp_path: Path) -> None:
    """Updates too small for bfloat16 add up, and the curve stays near float32's."""
    exact = tiny.trainer(tiny.ours(llama), tmp_path, max_steps=12)
    exact.train()
    mixed = tiny.trainer(tiny.ours(llama), tmp_path, max_steps=12, bf16=True)
    mixed.train()
    assert mixed.model.dtype == torch.bfloat16
    assert tiny.losses(mixed) == pytest.approx(tiny.losses(exact), rel=0.03)
    small = dict(max_steps=60, learning_rate=2e-6, weight_decay=0.0, lr_scheduler_type="constant")
    kept = tiny.trainer(tiny.ours(llama), tmp_path, bf16=True, **small)
    lost = tiny.trainer(tiny.ours(llama, dtype="bfloat16"), tmp_path, **small)
    kept.train()
    lost.train()
    assert all((p == 1).all() for name, p in lost.model.named_parameters() if "norm" in name)
    norms = kept.optimizer.param_groups[1]["params"]
    assert all(p.dtype == torch.float32 for p in norms)
    assert max(float((p.detach() - 1).abs().max()) for p in norms) > 5e-5


def test_what_can_not_be_trained_is_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="float16"):
        Trainer(tiny.ours(llama, dtype="float16"), args)
    with pytest.raises(ValueError, match="train_dataset"):
        Trainer(tiny.ours(llama), args).train()
    with pytest.raises(ValueError, match="requires_grad"):
        tiny.trainer(tiny.ours(llama).requires_grad_(False), tmp_path).train()
    with pytest.raises(ValueError, match="at least one batch"):
        Trainer(tiny.ours(llama), args, tiny.pad, []).train()
    model = tiny.ours(llama)
    own = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(ValueError, match="bf16"):
        Trainer(model, tiny.arguments(tmp_path, bf16=True), optimizers=own)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        Trainer(tiny.ours(llama), args)
