"""Sampling filters on scores [B, V] fp32: pure functions, each row on its own, no value leaves the device.

A parameter may be a number for all rows or a tensor [B] with one for each row; a row whose value is neutral is left
as it is. Removed tokens get `fill`. The meanings, ties included, are those of Transformers 5.17.
"""

import math

import torch
from torch import Tensor

Param = float | Tensor
_TOP_H_CANDIDATES = 100  # as in Transformers: entropy is counted over the 100 likeliest tokens


def column(value: Param) -> Param:
    """A per-row parameter [B] as [B, 1]; a number as it is."""
    return value[:, None] if isinstance(value, Tensor) else value


def temperature(scores: Tensor, value: Param) -> Tensor:
    """Divides the scores; rows of a tensor with 0 (greedy) are left as they are."""
    if isinstance(value, Tensor):
        value = torch.where(value > 0, value, 1.0)
    return scores / column(value)


def top_k(scores: Tensor, k: int | Tensor, *, fill: float = -math.inf, keep: int = 1) -> Tensor:
    """Keeps the k largest scores, and all that tie with the k-th; at least `keep`. 0 in a tensor [B]: off."""
    vocab = scores.shape[-1]
    if isinstance(k, Tensor):
        ordered = scores.sort(dim=-1, descending=True).values
        last = torch.where(k > 0, k.clamp(min=keep), vocab).clamp(max=vocab) - 1
        least = ordered.gather(-1, last[:, None].long())
    else:
        least = scores.topk(min(max(k, keep), vocab), dim=-1).values[:, -1:]
    return scores.masked_fill(scores < least, fill)


def top_p(scores: Tensor, p: Param, *, fill: float = -math.inf, keep: int = 1) -> Tensor:
    """Keeps the smallest set of likeliest tokens whose probabilities sum up to p, at least `keep` (Holtzman 2019)."""
    ascending, order = scores.sort(dim=-1)
    # Summed from the unlikely end: a token goes while it and all less likely ones hold at most 1 - p.
    drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - column(p)
    if isinstance(p, Tensor):
        drop &= column(p) < 1
    drop[:, -keep:] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), fill)


def min_p(scores: Tensor, p: Param, *, fill: float = -math.inf, keep: int = 1) -> Tensor:
    """Keeps tokens at least p times as likely as the likeliest, at least `keep` (Nguyen 2024)."""
    probs = scores.softmax(dim=-1)
    drop = probs < column(p) * probs.amax(dim=-1, keepdim=True)
    if keep > 1:  # the likeliest token stays by itself
        drop = drop.scatter(-1, probs.topk(min(keep, probs.shape[-1]), dim=-1).indices, False)
    return scores.masked_fill(drop, fill)


def typical(scores: Tensor, mass: Param, *, fill: float = -math.inf, keep: int = 1) -> Tensor:
    """Keeps tokens whose surprise is nearest the expected surprise until they hold `mass` (Meister 2022)."""
    logprobs = scores.log_softmax(dim=-1)
    entropy = -(logprobs * logprobs.exp()).nansum(dim=-1, keepdim=True)
    oddness, order = (-logprobs - entropy).abs().sort(dim=-1)
    held = scores.gather(-1, order).softmax(dim=-1).cumsum(dim=-1)
    last = (held < column(mass)).sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    drop = oddness > oddness.gather(-1, last)
    if isinstance(mass, Tensor):
        drop &= column(mass) < 1
    drop[:, :keep] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), fill)


def epsilon(scores: Tensor, cutoff: Param, *, fill: float = -math.inf, keep: int = 1) -> Tensor:
    """Keeps tokens of at least this probability, and the `keep` likeliest (Hewitt 2022)."""
    return _cut(scores, scores.softmax(dim=-1) < column(cutoff), fill, keep)


def eta(scores: Tensor, cutoff: Param, *, fill: float = -math.inf, keep: int = 1) -> Tensor:
    """Keeps tokens of probability at least min(cutoff, sqrt(cutoff) * exp(-entropy)), and the `keep` likeliest."""
    cutoff = cutoff if isinstance(cutoff, Tensor) else scores.new_full((scores.shape[0],), cutoff)
    bound = torch.minimum(cutoff, cutoff.sqrt() * (-_entropy(scores)).exp())
    return _cut(scores, scores.softmax(dim=-1) < bound[:, None], fill, keep)


def top_h(scores: Tensor, share: Param, *, fill: float = -math.inf) -> Tensor:
    """Keeps the likeliest tokens while their entropy terms sum up to at most `share` of the entropy (top-H, 2025)."""
    best, where = scores.topk(min(_TOP_H_CANDIDATES, scores.shape[-1]), dim=-1)
    logprobs = best.log_softmax(dim=-1)
    terms = -(logprobs.exp() * logprobs).nan_to_num()
    stays = terms.cumsum(dim=-1) <= _entropy(best)[:, None] * column(share)
    if isinstance(share, Tensor):
        stays |= column(share) >= 1
    stays[:, 0] = True
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, where, stays)
    return scores.masked_fill(~kept, fill)


def _entropy(scores: Tensor) -> Tensor:
    logprobs = scores.log_softmax(dim=-1)
    # Removed tokens have log-probability -inf and probability 0: their product must be 0, not nan.
    return -(logprobs.clamp(min=torch.finfo(scores.dtype).min) * logprobs.exp()).sum(dim=-1)


def _cut(scores: Tensor, drop: Tensor, fill: float, keep: int) -> Tensor:
    least_kept = scores.topk(min(keep, scores.shape[-1]), dim=-1).values[:, -1:]
    return scores.masked_fill(drop & (scores < least_kept), fill)
