"""Trainings on a GPU: the CPU's losses, bfloat16 with float32 weights, a resume, and how often a step waits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cuformers import TrainerCallback
from tests.train import tiny

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_llama(tmp_path_factory.mktemp("llama"))


def on_gpu(llama: Path, folder: Path, **options: Any) -> Any:
    return tiny.trainer(tiny.ours(llama, device_map="cuda"), folder, use_cpu=False, **options)


def test_losses_are_the_cpus(llama: Path, tmp_path: Path) -> None:
    options = dict(max_steps=12, gradient_accumulation_steps=2)
    here, there = tiny.trainer(tiny.ours(llama), tmp_path, **options), on_gpu(llama, tmp_path, **options)
    here.train()
    there.train()
    assert there.model.device.type == "cuda"
    assert tiny.losses(there) == pytest.approx(tiny.losses(here), rel=1e-3)


def test_bf16_stays_near_float32(llama: Path, tmp_path: Path) -> None:
    exact, mixed = on_gpu(llama, tmp_path, max_steps=12), on_gpu(llama, tmp_path, max_steps=12, bf16=True)
    exact.train()
    mixed.train()
    assert mixed.model.dtype == torch.bfloat16
    assert tiny.losses(mixed) == pytest.approx(tiny.losses(exact), rel=0.05)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_a_resumed_run_follows_the_uninterrupted_one(llama: Path, tmp_path: Path, bf16: bool) -> None:
    options = dict(max_steps=10, save_steps=5, save_strategy="steps", bf16=bf16)
    whole = on_gpu(llama, tmp_path, **options)
    whole.train()
    resumed = on_gpu(llama, tmp_path, **options)
    resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-5")
    assert tiny.losses(resumed) == pytest.approx(tiny.losses(whole), rel=1e-3 if not bf16 else 2e-2)


class NoSyncIn(TrainerCallback):
    """Lets a wait for the device raise from the second step's beginning to its end."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 1:
            torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_waits_for_its_finiteness_alone(
    llama: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The check before the optimizer; what else waits is listed here, in the order of the batch."""
    made = on_gpu(llama, tmp_path, max_steps=3, logging_steps=3, bf16=True, parts={"callbacks": [NoSyncIn]})
    made.train()
    places = {f"{Path(w.filename).name}:{w.lineno}" for w in recwarn if "synchroniz" in str(w.message)}
    inside = {place for place in places if place.startswith(("loop.py", "optimizer.py", "trainer.py"))}
    assert len(inside) <= 1, inside
