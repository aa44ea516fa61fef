"""TrainingArguments: Transformers' fields, each honoured or refused, and docs/training.md's lists of them."""

import dataclasses
import re
from typing import Any

import pytest
import transformers

from cuformers import TrainingArguments
from cuformers.train.refused import REFUSED
from tests.paths import ROOT

OURS = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
THEIRS = {
    field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for field in dataclasses.fields(transformers.TrainingArguments)
}


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_every_field_is_honoured_or_refused_with_their_default(name: str) -> None:
    default = getattr(THEIRS[name], "value", THEIRS[name])
    assert (name in OURS) != (name in REFUSED)
    assert (OURS[name] if name in OURS else REFUSED[name].default) == default
    TrainingArguments(**{name: default})


def test_nothing_else_is_a_field() -> None:
    assert {*OURS, *REFUSED} - {*THEIRS} == {"nan_policy"}


@pytest.mark.parametrize("name", sorted(name for name, entry in REFUSED.items() if not entry.inert))
def test_what_is_refused_says_why(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(REFUSED[name].reason)):
        TrainingArguments(**{name: "something"})
    args = TrainingArguments()
    with pytest.raises(ValueError, match=name):
        setattr(args, name, "something")


def test_what_changes_nothing_is_noticed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUFORMERS_QUIET", raising=False)
    TrainingArguments(run_name="a run of test_arguments")
    assert "run_name='a run of test_arguments' has no effect" in capsys.readouterr().err


def test_an_unknown_name_lists_near_ones() -> None:
    with pytest.raises(ValueError, match="learning_rate"):
        TrainingArguments(learning_rat=1e-3)
    with pytest.raises(ValueError, match=r"training\.md"):
        TrainingArguments(zzz=1)
    args = TrainingArguments()
    with pytest.raises(ValueError, match="max_steps"):
        args.max_step = 3  # type: ignore[attr-defined]


BAD: list[dict[str, Any]] = [
    {"learning_rate": -1.0}, {"learning_rate": float("nan")}, {"per_device_train_batch_size": 0},
    {"gradient_accumulation_steps": 1.5}, {"lr_scheduler_type": "greedy"}, {"optim": "adafactor"}, {"max_steps": 0},
    {"save_strategy": "sometimes"}, {"warmup_steps": 1.5}, {"logging_steps": 0}, {"bf16": "yes"}, {"seed": -1},
    {"adam_beta2": 1.0}, {"nan_policy": "ignore"}, {"load_best_model_at_end": True}, {"save_strategy": "best"},
    {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "no"},
    {"dataloader_prefetch_factor": 2}, {"dataloader_persistent_workers": True}, {"num_train_epochs": True},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD, ids=str)
def test_impossible_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{'|'.join(options)}|eval_strategy"):
        TrainingArguments(**options)


def test_older_names_and_derived_values() -> None:
    args = TrainingArguments(warmup_ratio=0.1, eval_strategy="steps", logging_steps=7, load_best_model_at_end=True)
    assert (args.warmup_steps, args.eval_steps, args.do_eval, args.metric_for_best_model) == (0.1, 7, True, "loss")
    assert args.output_dir == "trainer_output" and args.greater_is_better is False
    assert args.get_warmup_steps(95) == 10
    with pytest.raises(ValueError, match="leave out warmup_ratio"):
        TrainingArguments(warmup_ratio=0.1, warmup_steps=2)
    theirs = transformers.trainer_utils.IntervalStrategy("epoch")
    assert TrainingArguments(eval_strategy=theirs).eval_strategy == "epoch"


def test_the_page_lists_every_field() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    honoured, refused = text.split("## Options that are refused")
    rows = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
    assert set(rows.findall(honoured)) == set(OURS)
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", refused, re.MULTILINE))
    assert listed == {name: entry.reason for name, entry in REFUSED.items()}
