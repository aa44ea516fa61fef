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


def read_prompts(
    inputs: Tensor | None, attention_mask: Tensor | None, resolved: ResolvedGeneration, vocab_size: int
) -> Prompts:
    """Checks prompts and takes the padding out of them.

    Without a mask, tokens equal to the pad token are padding where it is not also an end-of-text token, as in
    Transformers.

    Raises:
        ValueError: wrong shapes, an empty row, a token outside the vocabulary, or nothing to start from.
    """
    if inputs is None:
        if resolved.bos_token_id is None:
            raise ValueError("generate needs input_ids, as the model has no bos_token_id to start from.")
        inputs = torch.tensor([[resolved.bos_token_id]])
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.dtype.is_floating_point:
        found = f"{inputs.dtype} of shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ValueError(f"input_ids must be an integer tensor of shape [batch, length], got {found}.")
    if attention_mask is not None and attention_mask.shape != inputs.shape:
        shapes = f"{tuple(attention_mask.shape)} for input_ids of shape {tuple(inputs.shape)}"
        raise ValueError(f"attention_mask must have input_ids' shape, got {shapes}.")
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
