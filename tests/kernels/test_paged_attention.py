"""paged_attention: the reference against dense attention, row by row, and what may never reach a result."""

import pytest
import torch

from cuformers.kernels.paged_attention.reference import paged_attention
from cuformers.kernels.paged_attention.triton import config

from .attention_cases import ATTENTIONS, AttentionShape, attend, lifted
from .judge import error

CPU = torch.device("cpu")


def dense(call, s: AttentionShape) -> torch.Tensor:
    """One head of one sequence at a time, over just the keys it sees."""
    q, _, _, tables, lengths = call.args
    k_cache, v_cache = lifted(call)
    out = torch.zeros_like(q)
    for n, length in enumerate(lengths.tolist()):
        seen = range(0 if s.window is None else max(0, length - s.window), length)
        for h in range(s.heads if length else 0):
            kv = h // (s.heads // s.kv_heads)
            k, v = (torch.stack([c[tables[n, p // s.page], kv, p % s.page] for p in seen]) for c in (k_cache, v_cache))
            score = (k @ q[n, h]) * call.kwargs["scale"]
            score = score if s.softcap is None else s.softcap * torch.tanh(score / s.softcap)
            weight = score.exp()
            total = weight.sum() + (call.kwargs["sinks"][h].exp() if s.sinks else 0.0)
            out[n, h] = (weight[:, None] * v).sum(0) / total
    return out


@pytest.mark.parametrize("shape", ATTENTIONS, ids=str)
def test_is_dense_attention_over_the_visible_keys(shape: AttentionShape) -> None:
    torch.manual_seed(0)
    call = attend(shape, False, torch.float32, CPU)
    assert call.args[1].isnan().any()
    assert error(paged_attention(*call.args, **call.kwargs), dense(call, shape)) < 1e-5


def test_tiles_fit_the_shared_memory_of_every_gpu() -> None:
    for dim, itemsize in ((64, 2), (128, 2), (256, 2), (64, 4), (128, 4)):
        cut = config(1, 8, dim, itemsize)
        assert 2 * cut.block_s * dim * itemsize * (cut.stages - 1) <= 96 * 1024


def test_refusals_name_the_remedy() -> None:
    from cuformers.kernels.paged_attention.triton import paged_attention as triton_attention

    call = attend(AttentionShape((5,), 2, 1, 32, page=16), False, torch.float32, CPU)
    q, k, v, tables, lengths = call.args
    with pytest.raises(ValueError, match=r"page_size=8.*power of two"):
        triton_attention(q, k[:, :, :8], v[:, :, :8], tables, lengths, scale=1.0)
    with pytest.raises(ValueError, match="num_heads=3"):
        triton_attention(q[:, [0, 0, 0]], k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), tables, lengths, scale=1.0)
