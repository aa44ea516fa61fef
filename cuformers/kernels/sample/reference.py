"""Sampling, with the filters in the order of Transformers: the specification."""

import torch
from torch import Tensor

from cuformers.kernels.sample.philox import gumbel


def argmax(logits: Tensor) -> Tensor:
    """Index of each row's largest logit, the first on ties; NaN loses to every number: [B, V] -> [B] int64."""
    return torch.where(logits.isnan(), -torch.inf, logits).argmax(-1)


def thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Least scaled logit that each row's filters keep, float32 [B]; -inf where nothing is filtered.

    A row is decided by values, so equal logits are kept or dropped together: top_k as in Transformers; top_p keeps
    every token above which less than top_p of the mass lies, and so may keep more than Transformers on ties alone.
    """
    z = scale(logits, temperature)
    ordered = z.sort(-1, descending=True).values
    rank = torch.where(top_k > 0, top_k, z.shape[1]).clamp(max=z.shape[1]).long() - 1
    by_rank = torch.where(top_k > 0, ordered.gather(1, rank[:, None])[:, 0], -torch.inf)
    kept = ordered >= by_rank[:, None]
    mass = torch.where(kept, ordered, -torch.inf).double().softmax(-1)
    above = mass.cumsum(-1) - mass
    # Equal values share the mass above the first of them.
    first = torch.searchsorted(-ordered, -ordered)
    kept &= above.gather(1, first) < top_p.double()[:, None].clamp(min=1e-300)
    by_mass = torch.where(kept, ordered, torch.inf).amin(-1)
    by_mass = torch.where(top_p < 1.0, by_mass, by_rank)
    by_peak = torch.where(min_p > 0, ordered[:, 0] + min_p.log(), -torch.inf)
    return torch.maximum(by_mass, by_peak)


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits / temperature in float32, as a product with the inverse; a greedy row (temperature 0) stays as it is.

    NaN becomes -inf. A temperature under 1e-6 counts as that.
    """
    factor = torch.where(temperature > 0, 1.0 / temperature.clamp(min=1e-6), 1.0)
    return torch.where(logits.isnan(), -torch.inf, logits.float() * factor[:, None])


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token per row, by the largest logit plus Gumbel noise among those kept: [B, V] -> [B] int64."""
    z = scale(logits, temperature)
    lowest = thresholds(logits, temperature, top_k, top_p, min_p)
    noisy = torch.where(z >= lowest[:, None], z + gumbel(seeds, positions, z.shape[1]), -torch.inf)
    return torch.where((temperature > 0)[:, None], noisy, z).argmax(-1)
