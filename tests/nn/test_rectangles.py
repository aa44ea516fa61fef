"""Ragged streams as rectangles: every token once, and the attention of the oracle, with its gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuformers.nn.attention import rectangles as module
from cuformers.nn.attention import sdpa
from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.attention.rectangles import rectangles
from cuformers.nn.attention.sdpa import SdpaAttention
from cuformers.nn.attention.sdpa_rule import SdpaChoice
from cuformers.nn.step import full_step

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_every_token_has_one_cell(lengths: list[int]) -> None:
    stream = torch.arange(sum(lengths)) + 1
    found = [group.filled(stream) for group in rectangles(tuple(lengths), CPU)]
    assert torch.equal(torch.cat([x[x > 0] for x in found]).sort().values, stream)
    rows = [row[row > 0] for x in found for row in x]
    assert sorted(map(len, rows)) == sorted(lengths)
    assert all(torch.equal(row, torch.arange(int(row[0]), int(row[0]) + len(row))) for row in rows)
    assert all((x > 0).sum(1).min() >= module.FILL * x.shape[1] for x in found)


def test_masks_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 3 * 100 * 100)
    assert [group.real.shape for group in rectangles((100,) * 7 + (9000,), CPU)] == [
        (1, 9000), (3, 100), (3, 100), (1, 100)
    ]  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4, 31])
@pytest.mark.parametrize("lengths", [(1, 40, 13), (33, 30, 31, 9, 8, 200)], ids=str)
def test_attention_and_gradients(
    lengths: tuple[int, ...], window: int | None, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "choose_kernel", lambda problem: SdpaChoice("efficient", "as on a GPU in float32"))
    monkeypatch.setattr(sdpa, "PRIORITY", {})
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    spec = AttentionSpec(layer=0, **sizes, scale=0.3, window=window, causal=causal)
    torch.manual_seed(0)
    x = [torch.randn(sum(lengths), heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    positions, goal = torch.cat([torch.arange(n) for n in lengths]), torch.randn(sum(lengths), 4, 16)
    results = []
    for backend in (EagerAttention(), SdpaAttention()):
        out = backend.forward(*x, spec, full_step(positions, lengths, backend))
        results.append((out, *torch.autograd.grad((out * goal).sum(), x)))
    for ours, theirs in zip(*results):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs)


def test_what_inference_made_serves_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "choose_kernel", lambda problem: SdpaChoice("efficient", "as on a GPU in float32"))
    monkeypatch.setattr(sdpa, "PRIORITY", {})
    rectangles.cache_clear()
    spec = AttentionSpec(layer=0, num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0, causal=False)
    x, backend = torch.randn(12, 1, 8, requires_grad=True), SdpaAttention()
    step = full_step(torch.arange(12), (4, 5, 3), backend)
    with torch.inference_mode():
        backend.forward(x, x, x, spec, step)
    backend.forward(x, x, x, spec, step).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 31])
def test_float32_on_a_gpu(window: int | None, causal: bool) -> None:
    gpu, lengths = torch.device("cuda", 0), (33, 30, 31, 9, 8, 200, 1)
    spec = AttentionSpec(
        layer=0, num_heads=4, num_kv_heads=2, head_dim=32, scale=0.3, window=window, causal=causal
    )
    torch.manual_seed(0)
    x = [torch.randn(sum(lengths), heads, 32, device=gpu, requires_grad=True) for heads in (4, 2, 2)]
    positions = torch.cat([torch.arange(n) for n in lengths]).to(gpu)
    goal, results = torch.randn(sum(lengths), 4, 32, device=gpu), []
    for backend in (EagerAttention(), SdpaAttention()):
        out = backend.forward(*x, spec, full_step(positions, lengths, backend))
        results.append((out, *torch.autograd.grad((out * goal).sum(), x)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
