"""Checkpoints: resumed trainings are the uninterrupted ones bit by bit, and a kill leaves none that misleads."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cuformers import EarlyStoppingCallback, LoraConfig, Trainer, TrainerCallback, get_peft_model
from cuformers.base.errors import CheckpointError
from cuformers.train import checkpoints, resume
from tests.models.checkpoints import load
from tests.train import tiny


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_llama(tmp_path_factory.mktemp("llama"))


class Killed(Exception):
    """Stands for the end of a process."""


class KillAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def same(first: Trainer, second: Trainer) -> bool:
    return all(torch.equal(p, q) for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("killed_at", [4, 6, 9], ids=["mid-pass", "end-of-pass", "second-pass"])
def test_a_resumed_run_is_the_uninterrupted_one(llama: Path, tmp_path: Path, killed_at: int, bf16: bool) -> None:
    options = dict(num_train_epochs=2, gradient_accumulation_steps=2, save_steps=2, logging_steps=3, bf16=bf16)
    options |= dict(eval_strategy="steps", eval_steps=3, save_strategy="steps")
    whole = tiny.trainer(tiny.ours(llama), tmp_path / "whole", **options)
    whole.train()
    assert whole.state.global_step == 12
    killed = tiny.trainer(tiny.ours(llama), tmp_path / "killed", **options, parts={"callbacks": [KillAfter(killed_at)]})
    with pytest.raises(Killed):
        killed.train()
    torch.manual_seed(999)  # another process
    resumed = tiny.trainer(tiny.ours(llama), tmp_path / "killed", **options)
    resumed.train(resume_from_checkpoint=True)
    assert same(whole, resumed)
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss")
    logs = [[{k: e[k] for k in kept if k in e} for e in t.state.log_history] for t in (whole, resumed)]
    assert logs[0] == logs[1]
    assert resumed.state.log_history[-1]["train_loss"] == whole.state.log_history[-1]["train_loss"]


@pytest.mark.parametrize("row", ["mixtral", "qwen3-tied"])
def test_every_weight_comes_back(tmp_path: Path, row: str) -> None:
    """Experts that are fused in memory, and a tied head."""
    options = dict(max_steps=4, save_steps=2, save_strategy="steps")
    whole = tiny.trainer(load(row), tmp_path, **options)
    whole.train()
    resumed = tiny.trainer(load(row), tmp_path, **options)
    resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert same(whole, resumed)
    assert not any(torch.equal(p, q) for p, q in zip(whole.model.parameters(), load(row).parameters(), strict=True))


@pytest.mark.parametrize("name", ["default", "other"])
def test_adapters_come_back(llama: Path, tmp_path: Path, name: str) -> None:
    """They are all that is saved; another rank is refused before anything is changed."""

    def adapted(rank: int = 4) -> Any:
        torch.manual_seed(3)
        return get_peft_model(tiny.ours(llama), LoraConfig(r=rank, target_modules="all-linear"), name)

    options = dict(max_steps=4, save_steps=2, save_strategy="steps")
    whole = tiny.trainer(adapted(), tmp_path, **options)
    whole.train()
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    resumed = tiny.trainer(adapted(), tmp_path, **options)
    resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert same(whole, resumed)
    fresh = [p for p in adapted().parameters() if p.requires_grad]
    trained = [p for p in whole.model.parameters() if p.requires_grad]
    assert not any(torch.equal(p, q) for p, q in zip(fresh, trained, strict=True))
    other = tiny.trainer(adapted(2), tmp_path, **options)
    before = [p.clone() for p in other.model.parameters()]
    with pytest.raises(CheckpointError, match="another rank"):
        other.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert all(torch.equal(p, q) for p, q in zip(before, other.model.parameters()))


def test_data_before_the_place_is_not_read_again(llama: Path, tmp_path: Path) -> None:
    read: list[int] = []

    class Counted(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return tiny.examples(24)[index]

    def make(**parts: Any) -> Trainer:
        args = tiny.arguments(tmp_path, num_train_epochs=1, save_steps=5, save_strategy="steps")
        return Trainer(tiny.ours(llama), args, tiny.pad, Counted(), **parts)

    with pytest.raises(Killed):
        make(callbacks=[KillAfter(10)]).train()
    first = read.copy()
    read.clear()
    make().train(resume_from_checkpoint=True)
    assert len(read) == 4 and not set(read) & set(first[:20])


def test_transformers_reads_the_state(llama: Path, tmp_path: Path) -> None:
    made = tiny.trainer(tiny.ours(llama), tmp_path, max_steps=2, save_strategy="steps")
    made.train()
    folder = tmp_path / "checkpoint-2"
    state = transformers.TrainerState.load_from_json(str(folder / "trainer_state.json"))
    assert state.global_step == 2 and state.log_history == made.state.log_history[:2]
    other = tiny.theirs(folder)
    for name, parameter in made.model.named_parameters():
        assert torch.equal(parameter, dict(other.named_parameters())[name])
    assert json.loads((folder / "training_args.json").read_text())["learning_rate"] == 1e-2


SPOILED: dict[str, Callable[[Path], object]] = {
    "truncated": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "flipped": lambda folder: _flip(folder / "optimizer.pt"),
    "missing": lambda folder: (folder / "scheduler.pt").unlink(),
    "no-state": lambda folder: (folder / "trainer_state.json").unlink(),
    "manifest": lambda folder: (folder / "manifest.json").write_text("{"),
}


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", SPOILED)
def test_a_damaged_newest_checkpoint_is_passed_over(llama: Path, tmp_path: Path, how: str) -> None:
    tiny.trainer(tiny.ours(llama), tmp_path, max_steps=4, save_steps=2, save_strategy="steps").train()
    SPOILED[how](tmp_path / "checkpoint-4")
    again = tiny.trainer(tiny.ours(llama), tmp_path, max_steps=4, save_strategy="no")
    assert checkpoints.newest(tmp_path) == tmp_path / "checkpoint-2"
    with pytest.raises(CheckpointError, match="checkpoint-4"):
        again.train(resume_from_checkpoint=tmp_path / "checkpoint-4")
    again.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in again.state.log_history] == [1, 2, 3, 4, 4]
    SPOILED[how](tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        again.train(resume_from_checkpoint=True)


WRITES = {
    "weights": (resume, "save_model"),
    "optimizer": (torch, "save"),
    "progress": (resume, "write_json"),
    "sync": (os, "fsync"),
    "manifest": (checkpoints, "write_synced"),
    "rename": (os, "replace"),
}


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")], ids=["kill", "full"])
@pytest.mark.parametrize("where", WRITES)
def test_a_kill_while_saving_leaves_the_last_checkpoint(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    home, name = WRITES[where]
    real = getattr(home, name)
    state = {"armed": False, "raised": False}

    class Arm(TrainerCallback):
        def on_save(self, args: Any, s: Any, control: Any, **kwargs: Any) -> None:
            state["armed"] = True

    def fails(*args: Any, **kwargs: Any) -> Any:
        if state["armed"]:
            state["raised"] = True
            raise error
        return real(*args, **kwargs)

    made = tiny.trainer(
        tiny.ours(llama), tmp_path, max_steps=4, save_steps=2, save_strategy="steps", save_total_limit=1,
        parts={"callbacks": [Arm]},
    )  # fmt: skip
    for module in {home, *_users(name, real)}:
        monkeypatch.setattr(module, name, fails)
    with pytest.raises(type(error)):
        made.train()
    monkeypatch.undo()
    assert state["raised"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert checkpoints.damage(tmp_path / "checkpoint-2") is None


def _users(name: str, function: Any) -> list[Any]:
    """Modules of the room that imported the function by its name."""
    from cuformers.train import loop, trainer

    return [module for module in (checkpoints, resume, loop, trainer) if getattr(module, name, None) is function]


def test_what_the_place_depends_on_must_not_change(llama: Path, tmp_path: Path) -> None:
    tiny.trainer(tiny.ours(llama), tmp_path, max_steps=2, save_strategy="steps").train()
    for changed in (dict(per_device_train_batch_size=3), dict(seed=1), dict(gradient_accumulation_steps=2)):
        other = tiny.trainer(tiny.ours(llama), tmp_path, max_steps=4, **changed)
        with pytest.raises(ValueError, match=next(iter(changed))):
            other.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="26 examples"):
        tiny.trainer(tiny.ours(llama), tmp_path, rows=26, max_steps=4).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="bf16"):
        tiny.trainer(tiny.ours(llama), tmp_path, max_steps=4, bf16=True).train(resume_from_checkpoint=True)


def test_weights_alone_are_no_place_to_resume_from(llama: Path, tmp_path: Path) -> None:
    options = dict(max_steps=2, save_strategy="steps", save_only_model=True)
    tiny.trainer(tiny.ours(llama), tmp_path, **options).train()
    assert not (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    with pytest.raises(CheckpointError, match="save_only_model"):
        tiny.trainer(tiny.ours(llama), tmp_path, **options).train(resume_from_checkpoint=True)


def test_best_and_last_are_never_deleted(llama: Path, tmp_path: Path) -> None:
    def worse(given: Any) -> dict[str, float]:
        worse.calls += 1  # type: ignore[attr-defined]
        return {"score": -float(worse.calls)}  # type: ignore[attr-defined]

    worse.calls = 0  # type: ignore[attr-defined]
    options = dict(max_steps=8, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    options |= dict(save_total_limit=1, metric_for_best_model="score", load_best_model_at_end=True)
    made = tiny.trainer(tiny.ours(llama), tmp_path, **options, parts={"compute_metrics": worse})
    made.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-8"]
    best = tiny.ours(tmp_path / "checkpoint-2")
    assert all(torch.equal(p, q) for p, q in zip(best.parameters(), made.model.parameters(), strict=True))


def test_a_best_evaluation_is_saved_whatever_save_steps_say(llama: Path, tmp_path: Path) -> None:
    options = dict(max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=5)
    made = tiny.trainer(tiny.ours(llama), tmp_path, **options, load_best_model_at_end=True)
    made.train()
    assert made.state.best_global_step and (tmp_path / f"checkpoint-{made.state.best_global_step}").is_dir()
    assert made.evaluate()["eval_loss"] == pytest.approx(made.state.best_metric)


def test_early_stopping_keeps_its_count(llama: Path, tmp_path: Path) -> None:
    options = dict(max_steps=4, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    options |= dict(metric_for_best_model="loss", restore_callback_states_from_checkpoint=True)
    counting = EarlyStoppingCallback(5)
    first = tiny.trainer(tiny.ours(llama), tmp_path, **options, parts={"callbacks": [counting]})
    counting.early_stopping_threshold = 1e9
    first.train()
    count = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert count["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": 1}
    fresh = EarlyStoppingCallback(5)
    tiny.trainer(tiny.ours(llama), tmp_path, **options, parts={"callbacks": [fresh]}).train(resume_from_checkpoint=True)
    assert (fresh.early_stopping_patience_counter, fresh.early_stopping_threshold) == (1, 1e9)


def test_workers_change_nothing(llama: Path, tmp_path: Path) -> None:
    options = dict(max_steps=15, save_steps=7, save_strategy="steps")
    alone = tiny.trainer(tiny.ours(llama), tmp_path / "alone", **options)
    alone.train()
    options |= dict(dataloader_num_workers=2, dataloader_prefetch_factor=3, dataloader_persistent_workers=True)
    helped = tiny.trainer(tiny.ours(llama), tmp_path / "helped", **options)
    helped.train()
    resumed = tiny.trainer(tiny.ours(llama), tmp_path / "helped", **options)
    resumed.train(resume_from_checkpoint=tmp_path / "helped" / "checkpoint-7")
    assert same(alone, helped) and same(alone, resumed)
