"""From a list of examples to a batch of tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cuformers.base.errors import bad_argument

Collator = Callable[[list[Any]], Any]
"""What Trainer(data_collator=...) takes."""
IGNORE = -100
_LABEL_NAMES = ("label", "label_ids")


class Padder(Protocol):
    """A tokenizer, of ours or of Transformers, as far as collators need it."""

    pad_token_id: int | None

    def pad(self, encoded_inputs: Any, **options: Any) -> Any: ...


def default_data_collator(features: Sequence[Mapping[str, Any]], return_tensors: str = "pt") -> dict[str, Tensor]:
    """Stacks what equally named entries hold; `label` and `label_ids` become `labels`. Strings and None are left out.

    Raises:
        ValueError: entries of different shapes, which need a collator that pads.
    """
    if return_tensors != "pt":
        raise bad_argument("return_tensors", return_tensors, "'pt'")
    batch: dict[str, Tensor] = {}
    for name, first in features[0].items():
        if first is None or isinstance(first, str):
            continue
        values = [torch.as_tensor(example[name]) for example in features]
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            raise ValueError(
                f"{name!r} has different shapes in one batch ({sorted(shapes)[:4]}): pass the tokenizer as "
                "processing_class, or a data_collator that pads, such as DataCollatorForLanguageModeling."
            )
        batch["labels" if name in _LABEL_NAMES else name] = torch.stack(values)
    return batch


@dataclass
class DataCollatorWithPadding:
    """Pads to one length with the tokenizer's `pad`; `label` and `label_ids` become `labels`."""

    tokenizer: Padder
    """Has `pad` and a pad token."""
    padding: bool | str = True
    """True or "longest", "max_length", or False."""
    max_length: int | None = None
    """Tokens, with padding="max_length"."""
    pad_to_multiple_of: int | None = None
    """Lengths are rounded up to a multiple of this."""
    return_tensors: str = "pt"
    """Always "pt"."""

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = dict(
            self.tokenizer.pad(
                [dict(one) for one in features],
                padding=self.padding,
                max_length=self.max_length,
                pad_to_multiple_of=self.pad_to_multiple_of,
                return_tensors=self.return_tensors,
            )
        )
        for name in _LABEL_NAMES:
            if name in batch:
                batch["labels"] = batch.pop(name)
        return batch


@dataclass
class DataCollatorForLanguageModeling:
    """Pads, and makes labels of the tokens themselves: next-token prediction, the model shifts them.

    Labels that an example brings are taken as they are, and padded with -100. Unlike Transformers' collator, which
    goes by the token's number, it ignores exactly the positions that were padded: a real end-of-sequence token counts
    even where it is the pad token too.
    """

    tokenizer: Padder
    """Has `pad` and a pad token."""
    mlm: bool = False
    """Only False: models here predict the next token."""
    pad_to_multiple_of: int | None = None
    """Lengths are rounded up to a multiple of this."""
    return_tensors: str = "pt"
    """Always "pt"."""

    def __post_init__(self) -> None:
        if self.mlm:
            raise bad_argument("mlm", True, "False", "Masked language modelling has no model here that trains on it.")

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        examples = [dict(one) if isinstance(one, Mapping) else {"input_ids": one} for one in features]
        examples = [{k: v.tolist() if isinstance(v, Tensor) else v for k, v in one.items()} for one in examples]
        given = [one.pop("labels", None) for one in examples]
        lengths = [len(one["input_ids"]) for one in examples]
        batch = dict(
            self.tokenizer.pad(
                examples, padding=True, pad_to_multiple_of=self.pad_to_multiple_of, return_tensors=self.return_tensors
            )
        )
        labels = torch.full_like(batch["input_ids"], IGNORE)
        for row, (length, own) in enumerate(zip(lengths, given)):
            begin = labels.shape[1] - length if _pads_left(self.tokenizer) else 0
            inputs = batch["input_ids"][row, begin : begin + length]
            masked = batch["attention_mask"][row, begin : begin + length] == 0 if "attention_mask" in batch else None
            labels[row, begin : begin + length] = inputs if own is None else torch.as_tensor(own)
            if own is None and masked is not None:
                labels[row, begin : begin + length][masked] = IGNORE
        return {**batch, "labels": labels}


def _pads_left(tokenizer: Padder) -> bool:
    return getattr(tokenizer, "padding_side", "right") == "left"
