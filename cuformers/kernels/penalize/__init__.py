"""Op `penalize`: scores from logits, with the common options of each row's own, whatever the other rows ask for.

    penalize(logits [R, V], rows [R] int32, lengths [R] int32, history [B, L] int32, penalties: Penalties,
             counts [B, V] int32) -> [R, V] float32

Row r of the logits continues `history[rows[r], :lengths[r]]`, and takes the options that `penalties` has for that
row; with a negative row it is copied. No row of the history is continued twice. In Transformers' order: the bias is
added; repetition divides positive and multiplies negative scores of tokens in prompt or answer; frequency is subtracted
once for each time that a token was generated; presence once for each generated token; end-of-sequence tokens are banned
(-inf) until `min_new_tokens` were generated. A banned word of one token is a bias of -inf: that holds through all of
the others. Every step is rounded to float32, as if each were an op of its own.

counts is a workspace (`workspace`): zero before, and left so.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.kernels.op import two_ways


class Penalties(NamedTuple):
    """Options of B rows of history."""

    prompt_lengths: Tensor
    """[B], int32: tokens of the prompt, which history begins with."""
    repetition: Tensor
    """[B], float32, above 0; 1 is off."""
    frequency: Tensor
    """[B], float32; 0 is off."""
    presence: Tensor
    """[B], float32; 0 is off."""
    min_new_tokens: Tensor
    """[B], int32; 0 is off."""
    eos: Tensor
    """[B, E], int64: tokens that end the row, filled up with -1; those outside the vocabulary are passed over."""
    bias_ids: Tensor
    """[B, K], int64: tokens below V, each at most once in a row, filled up with -1."""
    bias: Tensor
    """[B, K], float32: added to the logits of these tokens."""


def workspace(num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
    """The `counts` of the op for `num_rows` rows of history and logits over `num_tokens` tokens."""
    return torch.zeros(num_rows, num_tokens, dtype=torch.int32, device=device)


OP = two_ways(__name__, "penalize")
