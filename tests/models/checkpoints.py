"""The tiny checkpoints of families.py on disk, made once a process, and the same model on both sides."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cuformers.auto.causal_lm import AutoModelForCausalLM
from models.families import FAMILIES, tiny_model

torch.set_num_threads(1)

_ROOT = tempfile.TemporaryDirectory(prefix="cuformers-tests-")  # of this process alone; removed at its end

ALONE = ("llama-dynamic", "phi3-longrope")
"""Rows whose rotation transformers takes from the longest row of a batch, and cuformers from each row itself."""
WITHOUT_SDPA = tuple(name for name, f in FAMILIES.items() if f.config in ("Gemma2Config", "GptOssConfig"))
"""Rows that sdpa can't serve."""


@cache
def oracle(name: str) -> Any:
    """The transformers model of a row, in eval mode; never change it."""
    return tiny_model(name)


@cache
def folder(name: str) -> Path:
    """The row's checkpoint, written by transformers."""
    path = Path(_ROOT.name) / name
    oracle(name).save_pretrained(path)
    return path


def load(name: str, **options: Any) -> Any:
    """The row's checkpoint, loaded by cuformers."""
    where: dict[str, Any] = {"dtype": "float32", "device_map": "cpu", "progress": False}
    return AutoModelForCausalLM.from_pretrained(folder(name), **{**where, **options})


@cache
def shared(name: str) -> Any:
    """The same, one for all tests that leave it as it is."""
    return load(name)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))
