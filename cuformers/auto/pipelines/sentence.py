"""Sentence vectors: how token vectors become one, and what sentence-transformers' folders say about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cuformers.auto.config import Name
from cuformers.base.errors import CheckpointError, bad_argument
from cuformers.checkpoint.json_file import read_json, read_json_value
from cuformers.checkpoint.resolve import resolve_file

POOLINGS = ("mean", "cls", "last")
_MODES = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last",
    "mean": "mean", "cls": "cls", "lasttoken": "last",
}  # fmt: skip
"""What 1_Pooling/config.json calls them, in its older and its newer form."""


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """From the vectors of a text's tokens to one vector of the text."""

    pooling: str
    """"mean" of all tokens, the first one ("cls"), or the "last" one; special tokens count."""
    normalize: bool = False
    """Whether vectors have length 1, so that products are cosines."""
    max_length: int | None = None
    """Tokens after which texts are cut off; None leaves that to the tokenizer and the model."""
    lowercase: bool = False
    """Whether texts are put into lower case first."""

    def vectors(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Hidden states [B, S, H], zeros after `lengths` [B] tokens -> [B, H], float32."""
        if self.pooling == "mean":
            pooled = hidden.sum(1, dtype=torch.float32) / lengths[:, None]
        else:
            at = torch.zeros_like(lengths) if self.pooling == "cls" else lengths - 1
            pooled = hidden[torch.arange(len(at), device=at.device), at].float()
        return F.normalize(pooled, dim=-1) if self.normalize else pooled


def read_sentence(name_or_path: Name, where: Mapping[str, Any]) -> Sentence | None:
    """What modules.json and the files that it names say of a checkpoint; None where there is no such file.

    Raises:
        CheckpointError: files that can't be read.
        ValueError: steps that we don't have, such as a further linear map or another pooling.
    """
    listed = resolve_file(name_or_path, "modules.json", **where)
    if listed is None:
        return None
    modules = read_json_value(listed)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{listed} must hold a list of JSON objects.")
    kinds = [(str(module.get("type")).rpartition(".")[2], str(module.get("path"))) for module in modules]
    odd = [kind for kind, _ in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    folder = next((path for kind, path in kinds if kind == "Pooling"), None)
    if odd or folder is None:
        found = [kind for kind, _ in kinds]
        raise bad_argument("modules.json", found, "Transformer, Pooling and perhaps Normalize", "Give pooling= itself.")
    settings = _read(name_or_path, "sentence_bert_config.json", where) or {}
    return Sentence(
        pooling=_pooling(name_or_path, f"{folder}/config.json", where),
        normalize=any(kind == "Normalize" for kind, _ in kinds),
        max_length=settings.get("max_seq_length"),
        lowercase=bool(settings.get("do_lower_case")),
    )


def _pooling(name_or_path: Name, filename: str, where: Mapping[str, Any]) -> str:
    config = _read(name_or_path, filename, where)
    if config is None:
        raise CheckpointError(f"{name_or_path} has no {filename}, which its modules.json names.")
    named = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    named = named or [str(config.get("pooling_mode"))]
    if len(named) != 1 or named[0] not in _MODES:
        raise bad_argument(filename, named, f"one of {sorted(_MODES)}", "Give pooling= itself.")
    return _MODES[named[0]]


def _read(name_or_path: Name, filename: str, where: Mapping[str, Any]) -> dict[str, Any] | None:
    file = resolve_file(name_or_path, filename, **where)
    return None if file is None else read_json(file)
