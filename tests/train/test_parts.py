"""Schedules, weight decay, collators, the order of data: beside Transformers' own, or against their rule."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.trainer_pt_utils import get_parameter_names

from cuformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    default_data_collator,
    get_scheduler,
    set_seed,
)  # fmt: skip
from cuformers.train.data import BatchOrder
from cuformers.train.optimizer import decays
from cuformers.train.schedule import SCHEDULES
from tests.models.checkpoints import load, oracle
from tests.paths import DATA
from tests.train import tiny

FORBIDDEN = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]  # the reference's own
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "cosine": [{}, {"num_cycles": 1.5}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "cosine_with_min_lr": [{"min_lr": 1e-3}, {"min_lr_rate": 0.2}],
    "polynomial": [{}, {"power": 2.0, "lr_end": 1e-3}],
    "inverse_sqrt": [{}, {"timescale": 7}],
}


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(("name", "options"), [(n, o) for n in SCHEDULES for o in OPTIONS.get(n, [{}])], ids=str)
def test_schedules(name: str, options: dict[str, Any], warmup: int) -> None:
    def rates(make: Any) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
        scheduler = make(name, optimizer, warmup, 20, scheduler_specific_kwargs=options)
        found = []
        for _ in range(23):
            found.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return found

    assert rates(get_scheduler) == pytest.approx(rates(transformers.get_scheduler), rel=1e-9, abs=1e-15)


def test_an_unknown_option_of_a_schedule_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    with pytest.raises(ValueError, match="lr_scheduler_kwargs"):
        get_scheduler("linear", optimizer, 0, 10, {"power": 2})
    with pytest.raises(ValueError, match="num_training_steps"):
        get_scheduler("cosine", optimizer, 0)


@pytest.mark.parametrize("row", ["llama", "llama-mha-untied-biases", "qwen2", "qwen3-tied", "gemma3_text"])
def test_weight_decay_is_on_the_same_parameters(row: str) -> None:
    theirs = set(get_parameter_names(oracle(row), [torch.nn.LayerNorm], FORBIDDEN))
    decayed = decays(load(row))
    assert set(decayed) == {name for name, _ in oracle(row).named_parameters()}
    assert {name for name, on in decayed.items() if on} == theirs & set(decayed)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(DATA / "tokenizers" / "stories260k")
    made.pad_token = made.eos_token
    return made


def test_language_modeling_pads_and_ignores_padding_alone(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    collate = DataCollatorForLanguageModeling(tokenizer)
    batch = collate([{"input_ids": [5, 6, end]}, {"input_ids": [7]}, [8, 9]])
    right = tokenizer.padding_side == "right"
    assert batch["labels"].tolist() == (
        [[5, 6, end], [7, -100, -100], [8, 9, -100]] if right else [[5, 6, end], [-100, -100, 7], [-100, 8, 9]]
    )
    assert batch["attention_mask"].tolist() == [[int(x != -100) for x in row] for row in batch["labels"].tolist()]
    given = collate([{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}])
    assert given["labels"].tolist() == ([[-100, 6], [7, -100]] if right else [[-100, 6], [-100, 7]])
    with pytest.raises(ValueError, match="mlm"):
        DataCollatorForLanguageModeling(tokenizer, mlm=True)


def test_padding_and_stacking(tokenizer: Any) -> None:
    rows = [{"input_ids": [5, 6, 7], "label": 1}, {"input_ids": [8], "label": 0}]
    batch = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=4)(rows)
    assert batch["input_ids"].shape == (2, 4) and batch["labels"].tolist() == [1, 0] and "label" not in batch
    with pytest.raises(ValueError, match="different shapes"):
        default_data_collator(rows)
    equal = default_data_collator([{"input_ids": [1, 2], "label": 0.5, "text": "a"}] * 2)
    wanted = transformers.default_data_collator([{"input_ids": [1, 2], "label": 0.5, "text": "a"}] * 2)
    assert {n: (t.tolist(), t.dtype) for n, t in equal.items()} == {n: (t.tolist(), t.dtype) for n, t in wanted.items()}


def test_the_order_follows_from_seed_and_pass_alone() -> None:
    def order(seed: int, epoch: int, begin: int = 0) -> list[list[int]]:
        made = BatchOrder(23, 4, shuffle=True, drop_last=False, seed=seed)
        set_seed(epoch)
        made.enter(epoch, begin)
        return list(made)

    assert sorted(index for batch in order(1, 0) for index in batch) == list(range(23))
    assert order(1, 0) == order(1, 0) != order(1, 1) and order(1, 0) != order(2, 0)
    assert order(1, 3, 4) == order(1, 3)[4:]
    dropped = BatchOrder(23, 4, shuffle=False, drop_last=True, seed=0)
    assert list(dropped) == [list(range(i, i + 4)) for i in range(0, 20, 4)] and len(dropped) == 5


def test_reading_data_draws_nothing_from_the_global_generator(tmp_path: Path) -> None:
    model = tiny.ours(tiny.save_llama(tmp_path / "llama"))
    made = tiny.trainer(model, tmp_path)
    before = torch.get_rng_state()
    list(made.get_train_dataloader())
    assert torch.equal(before, torch.get_rng_state())


def test_an_iterable_data_set_needs_a_number_of_steps(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(tiny.examples(10))

    model = tiny.ours(tiny.save_llama(tmp_path / "llama"))
    made = Trainer(model, tiny.arguments(tmp_path, max_steps=7), tiny.pad, Stream())
    assert made.train().global_step == 7  # five batches in a pass
    with pytest.raises(ValueError, match="max_steps"):
        Trainer(model, tiny.arguments(tmp_path), tiny.pad, Stream()).train()


def test_unused_columns_are_left_out(tmp_path: Path) -> None:
    model = tiny.ours(tiny.save_llama(tmp_path / "llama"))
    rows = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5], "source": [1] * i} for i in range(4)]
    made = Trainer(model, tiny.arguments(tmp_path, max_steps=1), train_dataset=rows)
    made.train()
    with pytest.raises(ValueError, match="none of the columns"):
        Trainer(model, tiny.arguments(tmp_path, max_steps=1), train_dataset=[{"text": "a"}]).train()


def test_several_data_sets_and_predictions(tmp_path: Path) -> None:
    model = tiny.ours(tiny.save_llama(tmp_path / "llama"))
    args = tiny.arguments(tmp_path, per_device_eval_batch_size=3)
    made = Trainer(model, args, tiny.pad, eval_dataset={"a": tiny.examples(4), "b": tiny.examples(5, 1)})
    metrics = made.evaluate()
    assert metrics["eval_a_loss"] == made.evaluate(tiny.examples(4))["eval_loss"] and "eval_b_loss" in metrics
    rows = tiny.examples(5, 1)
    output = made.predict(rows)
    assert output.predictions.shape == (5, max(len(r["input_ids"]) for r in rows), 64)
    for row, logits in zip(rows, output.predictions):
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            alone = model(ids).logits[0]
        torch.testing.assert_close(torch.from_numpy(logits[: ids.shape[1]]), alone, rtol=1e-5, atol=1e-5)
