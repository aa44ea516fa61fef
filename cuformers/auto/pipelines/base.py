"""What every pipeline is: a model and its tokenizer behind one call."""

from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from cuformers.auto.pretrained import Pretrained
from cuformers.auto.tokenizers.tokenizer import Tokenizer
from cuformers.base.errors import bad_argument

M = TypeVar("M", bound=Pretrained)


class BasePipeline(Generic[M]):
    """A model and its tokenizer."""

    default_batch_size = 1
    """Texts that are computed at once where the user does not say."""

    def __init__(self, model: M, tokenizer: Tokenizer, batch_size: int | None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.batch_size = checked_batch_size(self.default_batch_size if batch_size is None else batch_size)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights."""
        return self.model.dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model.name_or_path!r}, {self.dtype}, {self.device})"

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes the model and the tokenizer into one folder."""
        self.model.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(save_directory)

    def _size(self, batch_size: int | None) -> int:
        """Texts that one call computes at once."""
        return self.batch_size if batch_size is None else checked_batch_size(batch_size)


def checked_batch_size(value: Any) -> int:
    """Raises ValueError unless it is an integer from 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad_argument("batch_size", value, "an integer from 1")
    return value
