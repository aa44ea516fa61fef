"""penalize in plain PyTorch: the specification."""

import torch
from torch import Tensor

from cuformers.kernels.penalize import Penalties


def penalize(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    history: Tensor,
    penalties: Penalties,
    counts: Tensor | None = None,
) -> Tensor:
    """See the package; needs no workspace."""
    row = rows.clamp(min=0).long()
    own = Penalties(*(x[row] for x in penalties))
    repetition, frequency, presence = (x[:, None] for x in (own.repetition, own.frequency, own.presence))
    place = torch.arange(history.shape[1], device=logits.device)
    there = place < lengths[:, None]
    answer = there & (place >= own.prompt_lengths[:, None])
    plain = logits.float()
    scores = plain + _spread(own.bias_ids, own.bias, plain)
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(_occurrences(history[row], there, plain) > 0, repeated, scores)
    generated = _occurrences(history[row], answer, plain)
    scores = scores - frequency * generated
    scores = torch.where(generated > 0, scores - presence, scores)
    early = lengths - own.prompt_lengths < own.min_new_tokens
    ends = _spread(own.eos, torch.ones_like(own.eos, dtype=plain.dtype), plain) > 0
    scores = scores.masked_fill(ends & early[:, None], -torch.inf)
    return torch.where(rows[:, None] < 0, plain, scores)


def _occurrences(tokens: Tensor, valid: Tensor, like: Tensor) -> Tensor:
    """[R, V], as `like`: how often each token is among those [R, L] that are valid."""
    # What does not count adds nothing to token 0.
    return torch.zeros_like(like).scatter_add(1, tokens.where(valid, 0).long(), valid.to(like.dtype))


def _spread(ids: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """[R, V], as `like`: the values [R, K] at their ids, and zeros; ids outside the vocabulary are passed over."""
    num_tokens = like.shape[1]
    spare = like.new_zeros(like.shape[0], num_tokens + 1)
    index = ids.where((ids >= 0) & (ids < num_tokens), num_tokens)
    return spare.scatter(1, index, values)[:, :num_tokens]
