"""Every attention backend against eager in float64, forward and backward; what it can't do, it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.attention.choose import BACKENDS, choose_backend
from cuformers.nn.attention.sdpa import SdpaAttention
from cuformers.nn.step import full_step
from tests.nn.attention_matrix import RAGGED, SHAPES, SQUARE, Shape, check

CPU = torch.device("cpu")
LACKS = {
    "sdpa": {"softcap", "sinks"},
    "flash_attention_2": {"softcap", "sinks"},
    "flash_attention_3": {"sinks"},
    "flash_attention_4": set(),
    "flex_attention": set(),
    "triton": set(),
    "eager": set(),
}
"""What each backend can't do: version 2 as PyTorch has it, the others as their packages are."""
NO_BACKWARD = {"cpu": {"flex_attention"}, "cuda": {"triton"}}


def fits(name: str, shape: Shape) -> bool:
    """Whether the backend can do what the shape asks."""
    return not LACKS[name] & shape.asks


def pairs(names: list[str]) -> list:
    """Every backend with every shape that it can do."""
    return [pytest.param(n, s, id=f"{n}-{s}") for n in names for s in SHAPES if fits(n, s)]


def test_every_backend_has_its_row() -> None:
    assert set(LACKS) == set(BACKENDS)


@pytest.mark.parametrize("name, shape", pairs(["sdpa", "flex_attention", "eager"]))
def test_on_the_cpu(name: str, shape: Shape) -> None:
    train = name not in NO_BACKWARD["cpu"]
    check(name, shape, torch.float32, CPU, train)
    if shape.lengths == RAGGED:
        check(name, shape, torch.bfloat16, CPU, train)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.lengths in (RAGGED, SQUARE) and s.asks], ids=str)
def test_eager_is_exact(shape: Shape) -> None:
    check("eager", shape, torch.float64, CPU, train=True)


@pytest.mark.parametrize("window", [1, 5, 40, 64])
def test_windows_of_long_sequences_need_no_square_mask(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuformers.nn.attention import sdpa

    largest: list[int] = []
    attend = sdpa._attend

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
        largest.append(0 if mask is None else mask.numel())
        return attend(q, k, v, mask, spec)

    monkeypatch.setattr(sdpa, "QUERIES_AT_ONCE", 32)
    monkeypatch.setattr(sdpa, "_attend", watched)
    for shape in (Shape((130,), window=window), Shape((130, 17, 32, 33), window=window)):
        check("sdpa", shape, torch.float32, CPU, train=True)
    assert 0 < max(largest) <= 32 * (32 + window)


@pytest.mark.parametrize("name", [n for n in LACKS if LACKS[n]])
def test_what_a_backend_lacks_it_refuses(name: str) -> None:
    backend = BACKENDS[name]()
    for shape in SHAPES:
        if not fits(name, shape):
            reason = backend.why_not(shape.problem(torch.float32, CPU, train=False))
            assert reason is not None
            with pytest.raises(ValueError, match=name):
                choose_backend(name, shape.problem(torch.float32, CPU, train=False))


def test_sdpa_names_each_thing_that_it_lacks() -> None:
    for shape, words in ((Shape((3,), softcap=1.0), "no softcap"), (Shape((3,), sinks=True), "no sinks")):
        assert words in (SdpaAttention().why_not(shape.problem(torch.float32, CPU, train=False)) or "")
    both = Shape((3,), softcap=1.0, sinks=True).problem(torch.float32, CPU, train=False)
    assert SdpaAttention().why_not(both) == "has no softcap and no sinks"


@pytest.mark.parametrize("name", list(BACKENDS))
def test_unequal_value_heads_are_served_or_refused(name: str) -> None:
    problem = replace(Shape((3,)).problem(torch.float32, CPU, train=False), v_head_dim=32)
    reason = BACKENDS[name]().why_not(problem)
    assert (reason is None) == (name in ("eager", "flex_attention"))
    assert reason is None or "value heads of another size" in reason or "needs an NVIDIA GPU" in reason


@pytest.mark.parametrize("name", ["eager", "flex_attention"])
@pytest.mark.parametrize("sinks", [False, True])
def test_value_heads_of_another_size(name: str, sinks: bool) -> None:
    torch.manual_seed(0)
    q, k, v, s = (torch.randn(*size) for size in ((20, 4, 24), (20, 2, 24), (20, 2, 16), (4,)))
    spec = AttentionSpec(
        layer=0, num_heads=4, num_kv_heads=2, head_dim=24, v_head_dim=16, scale=0.3, window=6, sinks=sinks
    )
    backend = BACKENDS[name]()
    out = backend.forward(q, k, v, spec, full_step(torch.arange(20), (13, 7), backend), s if sinks else None)
    i = 15  # query 2 of the second sequence
    weight = (k[13:16, 1] @ q[i, 3] * 0.3).exp()
    total = weight.sum() + (s[3].exp() if sinks else 0.0)
    torch.testing.assert_close(out[i, 3], weight @ v[13:16, 1] / total)


@pytest.mark.gpu
@pytest.mark.parametrize("name, shape", pairs([n for n in LACKS if n != "flash_attention_3"]))
def test_on_a_gpu(name: str, shape: Shape) -> None:
    device = torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float16):
        for train in (False, True):
            reason = BACKENDS[name]().why_not(shape.problem(dtype, device, train))
            if name == "flash_attention_4" and reason and "does not import" in reason:
                pytest.skip(reason)
            if train and name in NO_BACKWARD["cuda"]:
                assert reason and "no backward" in reason
                continue
            assert reason is None
            check(name, shape, dtype, device, train)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "flex_attention", "triton", "eager"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.lengths in (RAGGED, SQUARE) and s.head_dim <= 128], ids=str)
def test_float32_on_a_gpu(name: str, shape: Shape) -> None:
    if not fits(name, shape):
        pytest.skip("refused, as another test says")
    check(name, shape, torch.float32, torch.device("cuda"), train=name not in NO_BACKWARD["cuda"])
