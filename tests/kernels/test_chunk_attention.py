"""chunk_attention: the reference against dense attention, query by query, and what may never reach a result."""

import pytest
import torch
from torch import Tensor

from cuformers.kernels.chunk_attention import reference
from cuformers.kernels.chunk_attention.triton import config
from cuformers.kernels.table import reference as references

from .attention_cases import AttentionShape, attend, lifted
from .chunk_cases import CHUNKS, ChunkShape, chunk
from .judge import Call, error

CPU = torch.device("cpu")


def dense(call: Call, s: ChunkShape) -> Tensor:
    """One head of one query at a time, over just the keys it sees."""
    q, _, _, tables, bounds, rows, _ = call.args
    k_cache, v_cache = lifted(call)
    out = torch.zeros_like(q)
    for n, (count, length) in enumerate(s.chunks):
        for i in range(count):
            own = length - count + i
            seen = range(0 if s.window is None else max(0, own - s.window + 1), own + 1)
            at = [(int(tables[rows[n], p // s.page]), p % s.page) for p in seen]
            for h in range(s.heads):
                kv = h // (s.heads // s.kv_heads)
                k, v = (torch.stack([c[page, kv, offset] for page, offset in at]) for c in (k_cache, v_cache))
                score = (k @ q[bounds[n] + i, h]) * call.kwargs["scale"]
                score = score if s.softcap is None else s.softcap * torch.tanh(score / s.softcap)
                weight = score.exp()
                total = weight.sum() + (call.kwargs["sinks"][h].exp() if s.sinks else 0.0)
                out[bounds[n] + i, h] = (weight[:, None] * v).sum(0) / total
    return out


@pytest.mark.parametrize("block", [256, 7])
@pytest.mark.parametrize("shape", CHUNKS, ids=str)
def test_is_dense_attention_over_the_visible_keys(
    shape: ChunkShape, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(reference, "BLOCK", block)
    call = chunk(shape, torch.float32, CPU)
    assert call.args[1].isnan().any()
    found = reference.chunk_attention(*call.args, **call.kwargs)
    assert found.isfinite().all() and error(found, dense(call, shape)) < 1e-5


@pytest.mark.parametrize("sinks", [False, True])
def test_one_query_a_chunk_is_decode_attention(sinks: bool) -> None:
    torch.manual_seed(0)
    call = attend(AttentionShape((70, 1, 33), 4, 2, 64, window=40, sinks=sinks), False, torch.float32, CPU)
    q, k, v, tables, lengths = call.args
    call.kwargs.pop("plan")
    alone = references().paged_attention(q, k, v, tables, lengths, **call.kwargs)
    each = torch.arange(4).int()
    assert error(references().chunk_attention(q, k, v, tables, each, each[:3], lengths, **call.kwargs), alone) < 1e-6


def test_how_a_sequence_is_cut_into_chunks_changes_nothing() -> None:
    torch.manual_seed(0)
    q, k, v, tables, _, row, _ = chunk(ChunkShape(((90, 90),), 4, 2, 64), torch.float32, CPU).args
    whole = references().chunk_attention(q, k, v, tables, *_numbers((0, 90), row, (90,)), scale=0.1)
    parts = references().chunk_attention(q, k, v, tables, *_numbers((0, 33, 34, 90), row, (33, 34, 90)), scale=0.1)
    assert error(parts, whole) < 1e-6


def _numbers(bounds: tuple[int, ...], row: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(bounds).int(), row.repeat(len(lengths)), torch.tensor(lengths).int()


def test_the_reference_has_gradients() -> None:
    call = chunk(ChunkShape(((5, 9), (3, 3)), 4, 2, 16, sinks=True), torch.float64, CPU)
    q, k, v, *integers = call.args
    inputs = [x.nan_to_num().requires_grad_() for x in (q, k, v)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.chunk_attention(q, k, v, *integers, **call.kwargs)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_a_tile_holds_a_group_and_follows_the_shapes_only() -> None:
    for group in (1, 3, 8, 71, 128):
        for rows in (1, 40, 10_000):
            cut = config(rows, group, 128, torch.bfloat16)
            assert cut.block_m >= max(16, group) and cut.block_m & (cut.block_m - 1) == 0
    assert config(10_000, 2, 128, torch.bfloat16).block_m > config(4, 2, 128, torch.bfloat16).block_m


def test_refusals_name_the_remedy() -> None:
    from cuformers.kernels.chunk_attention.triton import chunk_attention

    q, k, v, *integers = chunk(ChunkShape(((5, 5),), 2, 1, 32), torch.float32, CPU).args
    with pytest.raises(ValueError, match=r"page_size=8.*power of two"):
        chunk_attention(q, k[:, :, :8], v[:, :, :8], *integers, scale=1.0)
    with pytest.raises(ValueError, match=r"head_dim=8.*kernels='reference'"):
        chunk_attention(q[..., :8], k[..., :8], v[..., :8], *integers, scale=1.0)
    with pytest.raises(ValueError, match="num_heads=3"):
        chunk_attention(q[:, [0, 0, 0]], k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), *integers, scale=1.0)
