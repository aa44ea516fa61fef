"""rope_cache: the reference against Transformers' rotary embedding, the cache's layout, and gradients."""

import pytest
import torch

from cuformers.kernels.norm.reference import rms_norm
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.rope_cache.reference import rope_cache

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def qkv_and_factors(tokens: int = 5, rot: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    angle = torch.rand(20, rot // 2, dtype=dtype) * 6
    return torch.randn(tokens, 64, dtype=dtype), angle.cos(), angle.sin(), torch.randint(0, 20, (tokens,)).int()


@pytest.mark.parametrize("rot", [8, 4])
def test_is_transformers_rotation(rot: int) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    qkv, cos, sin, rows = qkv_and_factors(rot=rot)
    g = Norm(torch.randn(8), 1e-3, 0.0)
    q, k, v = rope_cache(qkv, cos, sin, rows, **SHAPE, q_norm=g, k_norm=g)
    full_cos, full_sin = (torch.cat((f[rows], f[rows]), dim=-1)[None] for f in (cos, sin))
    heads = qkv.view(5, 8, 8)
    normed = rms_norm(heads[:, :6], *g).transpose(0, 1)[None]
    want, _ = modeling.apply_rotary_pos_emb(normed[..., :rot], normed[..., :rot], full_cos, full_sin)
    want = torch.cat((want, normed[..., rot:]), dim=-1)[0].transpose(0, 1)
    torch.testing.assert_close(torch.cat((q, k), dim=1), want)
    assert torch.equal(v, heads[:, 6:])


def test_without_factors_nothing_turns() -> None:
    qkv, _, _, rows = qkv_and_factors()
    q, k, v = rope_cache(qkv, None, None, rows, **SHAPE)
    assert torch.equal(torch.cat((q, k, v), dim=1).flatten(1), qkv)


def test_cache_holds_each_token_at_its_slot_and_nothing_else() -> None:
    qkv, cos, sin, rows = qkv_and_factors()
    pool = torch.full((2, 3, 2, 4, 8), torch.nan)
    slots = torch.tensor([9, -1, 0, 4, -1], dtype=torch.int32)
    _, k, v = rope_cache(qkv, cos, sin, rows, **SHAPE, k_cache=pool[0], v_cache=pool[1], slots=slots)
    want = torch.full((2, 3, 2, 4, 8), torch.nan)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[0, slot // 4, :, slot % 4], want[1, slot // 4, :, slot % 4] = k[token], v[token]
    torch.testing.assert_close(pool, want, equal_nan=True, rtol=0, atol=0)


def test_no_slot_at_all_leaves_the_cache_alone() -> None:
    qkv, cos, sin, rows = qkv_and_factors(tokens=2)
    pool = torch.randn(2, 3, 2, 4, 8)
    before = pool.clone()
    slots = torch.full((2,), -1, dtype=torch.int32)
    rope_cache(qkv, cos, sin, rows, **SHAPE, k_cache=pool[0], v_cache=pool[1], slots=slots)
    assert torch.equal(pool, before)


def test_gradients() -> None:
    qkv, cos, sin, rows = qkv_and_factors(tokens=2, rot=4, dtype=torch.float64)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def turned(qkv: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rope_cache(qkv, cos, sin, rows, **SHAPE, q_norm=Norm(weight, 0.1), k_norm=Norm(weight, 0.1, 1.0))

    assert torch.autograd.gradcheck(turned, (qkv.requires_grad_(), weight))
