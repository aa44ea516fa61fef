"""The prompts of a `generate` call: from a padded tensor to lists of tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.generation.resolved import ResolvedGeneration


class Prompts(NamedTuple):
    """Prompts in both forms."""

    rows: list[list[int]]
    """Real tokens of each row."""
    padded: Tensor
    """[B, width], int64: as given."""

    @property
    def width(self) -> int:
        """Tokens of a padded row."""
        return self.padded.shape[1]


def check_prompts(inputs: Tensor | None, attention_mask: Tensor | None) -> None:
    """Raises ValueError where the inputs are no integers [B, S], or the mask does not fit them."""
    if inputs is None:
        if attention_mask is not None:
            raise ValueError("attention_mask needs the input_ids that it belongs to.")
        return
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.dtype.is_floating_point:
        raise ValueError(f"input_ids must be an integer tensor of shape [batch, length], got {_kind(inputs)}.")
    if inputs.is_meta:
        raise ValueError("input_ids lies on the meta device, where tensors have no values: pass real tokens.")
    if not len(inputs):
        raise ValueError("input_ids has no row: there is nothing to continue.")
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.shape != inputs.shape):
        needs = f"a tensor of input_ids' shape {tuple(inputs.shape)}"
        raise ValueError(f"attention_mask must be {needs}, got {_kind(attention_mask)}.")


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def read_prompts(
    inputs: Tensor | None, attention_mask: Tensor | None, resolved: ResolvedGeneration, vocab_size: int
) -> Prompts:
    """Takes the padding out of prompts that `check_prompts` has seen.

    Without a mask, tokens equal to the pad token are padding where it is not also an end-of-text token, as in
    Transformers.

    Raises:
        ValueError: an empty row, a token outside the vocabulary, or nothing to start from.
    """
    if inputs is None:
        if resolved.bos_token_id is None:
            raise ValueError("generate needs input_ids, as the model has no bos_token_id to start from.")
        inputs = torch.tensor([[resolved.bos_token_id]])
    pad = resolved.pad_token_id
    if attention_mask is None and pad is not None and pad not in resolved.eos_token_ids:
        attention_mask = inputs != pad
    rows = inputs.tolist()
    if attention_mask is not None:
        rows = [[t for t, real in zip(row, mask) if real] for row, mask in zip(rows, attention_mask.tolist())]
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"row {index} of input_ids has no token: an empty prompt can't be continued.")
        wrong = next((t for t in row if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise bad_argument(f"input_ids[{index}]", wrong, f"0 to {vocab_size - 1}", "Is it the model's tokenizer?")
    return Prompts(rows, inputs.long())
