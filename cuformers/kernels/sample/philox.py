"""Counter-based random numbers in torch: the same seed, position and token give the same bits anywhere.

Philox 4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words, held in int64, for each broadcast counter and key (words 0 .. 2**32 - 1 in int64)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high_a, low_a = _multiply(_MULTIPLIER_A, c0)
        high_b, low_b = _multiply(_MULTIPLIER_B, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _WEYL_A) & _MASK, (k1 + _WEYL_B) & _MASK
    return c0, c1, c2, c3


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, through 16-bit halves: int64 would overflow."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & _MASK


def gumbel(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Gumbel noise [B, num_tokens], float32, keyed by (seed, position, token): seeds and positions are [B] int64.

    -log(-log(1 - v)) with v uniform in (0, 1): large noise comes from small v, where float32 is fine-grained; the
    inner logarithm is a series there.
    """
    token = torch.arange(num_tokens, device=seeds.device)[None, :]
    position, seed = positions[:, None], seeds[:, None]
    zero = torch.zeros_like(token)
    counter = (token, position & _MASK, (position >> 32) & _MASK, zero)
    bits = philox(counter, (seed & _MASK, (seed >> 32) & _MASK))[0]
    v = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    return -torch.log(torch.where(v < 0.01, series, -torch.log(1.0 - v)))
