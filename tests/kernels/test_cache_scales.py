"""Numbers in fp8 with a factor for each head: how near they are, that none clips, and what they depend on."""

import pytest
import torch

from cuformers.kernels.cache_scales import FP8, LARGEST, LEAST, CacheScales, dequantized, quantized
from cuformers.kernels.rope_cache.reference import rope_cache


@pytest.mark.parametrize("size", [1e-20, 3e-3, 1.0, 7e4, 1e30])
def test_rounding_is_within_half_a_step(size: float) -> None:
    """Three bits of mantissa: 1/16 of a number, or half the smallest step, which is 2^-9 of the factor."""
    torch.manual_seed(0)
    x = torch.randn(500, 64).double() * size * torch.logspace(-6, 0, 64)
    data, scale = quantized(x.float())
    error = (dequantized(data, scale).double() - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, scale[:, None] * 2.0**-10)).all()
    assert error.norm() < 0.04 * x.norm() and error.norm() > 0.01 * x.norm()


def test_nothing_clips_and_the_range_is_used() -> None:
    torch.manual_seed(0)
    x = torch.cat((torch.randn(2000, 8) * torch.logspace(-30, 30, 2000)[:, None], torch.full((1, 8), LARGEST)))
    data, scale = quantized(x)
    top = data.float().abs().amax(-1)
    assert top.max() == LARGEST and top.min() >= LARGEST / 2
    assert torch.equal(scale.frexp().mantissa, torch.full_like(scale, 0.5)), "factors are powers of two"
    assert dequantized(data, scale)[-1].eq(LARGEST).all() and scale[-1] == 1.0


def test_a_factor_is_never_zero() -> None:
    data, scale = quantized(torch.tensor([[0.0, -0.0], [1e-38, 0.0]]))
    assert (scale >= LEAST / LARGEST).all() and (1 / scale).isfinite().all()
    assert not data.float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_head_depends_on_itself_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(6, 2, 32) * torch.logspace(-2, 2, 6)[:, None, None]).to(dtype)
    together = quantized(x)
    for n in range(6):
        for h in range(2):
            alone = quantized(x[n, h])
            assert torch.equal(alone.data.view(torch.uint8), together.data[n, h].view(torch.uint8))
            assert alone.scale == together.scale[n, h]


def test_the_reference_writes_tokens_at_their_slots_and_nothing_else() -> None:
    torch.manual_seed(0)
    qkv, slots = torch.randn(5, 64), torch.tensor([9, -1, 0, 4, -1], dtype=torch.int32)
    data, scale = torch.full((2, 3, 2, 4, 8), torch.nan).to(FP8), torch.full((2, 3, 2, 4), torch.nan)
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    cache = {"k_cache": data[0], "v_cache": data[1], "scales": CacheScales(*scale), "slots": slots}
    _, k, v = rope_cache(qkv, None, None, slots, **heads, **cache)
    want = torch.full((2, 3, 2, 4, 8), torch.nan)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for half, x in enumerate((k, v)):
                want[half, slot // 4, :, slot % 4] = dequantized(*quantized(x[token]))
    torch.testing.assert_close(dequantized(data, scale), want, equal_nan=True, rtol=0, atol=0)
    assert scale.isnan().sum() == 2 * 2 * (12 - 3), "three tokens were written"
