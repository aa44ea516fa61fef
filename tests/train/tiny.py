"""A small llama on both sides, examples of uneven lengths, and trainings of it."""

from pathlib import Path
from typing import Any

import torch
import transformers

from cuformers import AutoModelForCausalLM, Trainer, TrainingArguments

torch.set_num_threads(1)


def save_llama(folder: Path) -> Path:
    """A random llama, written by transformers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def ours(folder: Path, **options: Any) -> Any:
    """The model of a folder, on the CPU."""
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "float32", "device_map": "cpu"} | options)


def theirs(folder: Path) -> Any:
    """The same, of transformers."""
    return transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def examples(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Random tokens of 3 to 12 a row; a few labels of each are ignored."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(3, 13, (), generator=generator))
        ids = torch.randint(3, 64, (length,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [-100, *ids[1:-1], ids[-1]] if length % 2 else ids})
    return found


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A data collator: rows are padded at their end."""
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    full = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {n: torch.tensor([row[n] + [v] * (width - len(row[n])) for row in full]) for n, v in fill.items()}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Small steps on the CPU, each logged, nothing saved."""
    usual = dict(
        use_cpu=True,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
    )
    return TrainingArguments(str(folder), **{**usual, **options})


def trainer(model: Any, folder: Path, *, rows: int = 24, **options: Any) -> Trainer:
    """A Trainer over `rows` examples; `parts` are its further arguments."""
    parts = options.pop("parts", {})
    return Trainer(model, arguments(folder, **options), pad, examples(rows), examples(7, 1), **parts)


def losses(made: Trainer) -> list[float]:
    """What was logged as loss."""
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]
