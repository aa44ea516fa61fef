"""Keys and values of a cache in fp8 (e4m3), with a factor for each token and kv head.

A factor is made when its token is written, from that head of that token alone: nothing is calibrated, nothing clips,
and what a token's key becomes does not depend on what is computed with it. Factors are powers of two, as those of the
OCP microscaling formats: a number's three bits of mantissa are the same under any factor, multiplying is exact, and
the logarithm that attention needs of a factor is its exponent.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.kernels.precision import wide

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number in e4m3."""
MANTISSA = (1 << 23) - 1
"""Bits of a float32."""
LEAST = 2.0**-100
"""A head that is smaller everywhere counts as this large: no factor is zero, and each has an inverse in float32."""


class CacheScales(NamedTuple):
    """What the numbers of a layer's fp8 pages are multiplied by: float32, powers of two."""

    keys: Tensor
    """[P, Hkv, page]."""
    values: Tensor
    """[P, Hkv, page]."""


class Quantized(NamedTuple):
    """Heads in fp8, and their factors."""

    data: Tensor
    """[..., D], float8_e4m3fn."""
    scale: Tensor
    """[...], float32, powers of two."""


def quantized(x: Tensor) -> Quantized:
    """Heads [..., D], the largest number of each in fp8's last octave; rounded to nearest, ties to even."""
    x = x.float()
    least = x.abs().amax(-1).clamp(min=LEAST) * (1 / LARGEST)
    scale = ((least.view(torch.int32) + MANTISSA) & ~MANTISSA).view(torch.float32)
    return Quantized((x / scale[..., None]).to(FP8), scale)


def dequantized(data: Tensor, scale: Tensor | None) -> Tensor:
    """Heads [..., D] of a cache in float32 (float64 stays); without a scale the numbers are what they are."""
    return wide(data) if scale is None else wide(data) * scale[..., None]


def pages_of(cache: Tensor, scale: Tensor | None, pages: Tensor) -> Tensor:
    """The same of some pages of a cache [P, ..., D]: [*pages.shape, ..., D]."""
    if cache.dtype != FP8:
        return dequantized(cache[pages], None if scale is None else scale[pages])
    assert scale is not None, "an fp8 cache has factors"
    return dequantized(bytes_of(cache)[pages].view(FP8), scale[pages])


def bytes_of(cache: Tensor) -> Tensor:
    """An fp8 tensor as uint8, for which PyTorch has every function on every device."""
    return cache.view(torch.uint8)
