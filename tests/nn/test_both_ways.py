"""Attention that is not causal: the oracle against the formula, the other backends against the oracle."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuformers.kernels.table import reference
from cuformers.nn.attention import sdpa
from cuformers.nn.attention.backend import BOTH_WAYS, AttentionSpec, problem_of
from cuformers.nn.attention.choose import BACKENDS, choose_backend
from cuformers.nn.attention.deterministic import deterministic_backend
from cuformers.nn.attention.varlen import adapted
from cuformers.nn.step import Step, full_step

CPU = torch.device("cpu")
LENGTHS = ((7, 7, 7), (1, 40, 13), (200, 65))


def spec_of(window: int | None, causal: bool = False) -> AttentionSpec:
    return AttentionSpec(
        layer=0, num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, window=window, causal=causal
    )


def inputs(lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 32).to(device, dtype) for heads in (4, 2, 2))
    return q, k, v


def step_of(lengths: tuple[int, ...], backend: str, device: torch.device) -> Step:
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    return full_step(positions, lengths, BACKENDS[backend]())


def attend(lengths: tuple[int, ...], spec: AttentionSpec, backend: str, device=CPU, dtype=torch.float32) -> Tensor:
    step = step_of(lengths, backend, device)
    assert step.backend is not None
    return step.backend.forward(*inputs(lengths, device, dtype), spec, step)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_the_oracle_is_the_formula(window: int | None) -> None:
    q, k, v = inputs((9,), CPU, torch.float32)
    out = attend((9,), spec_of(window), "eager")
    for i in range(9):
        seen = [j for j in range(9) if window is None or abs(i - j) < window]
        for head in range(4):
            weights = torch.softmax(k[seen, head // 2] @ q[i, head] * 0.2, dim=0)
            torch.testing.assert_close(out[i, head], weights @ v[seen, head // 2])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [None, 5, 64, 65])
@pytest.mark.parametrize("at_once", [32, 2048])
def test_sdpa_agrees_with_the_oracle(
    at_once: int, window: int | None, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "QUERIES_AT_ONCE", at_once)
    expected = attend(lengths, spec_of(window), "eager")
    torch.testing.assert_close(attend(lengths, spec_of(window), "sdpa"), expected)
    assert not torch.allclose(attend(lengths, spec_of(window, causal=True), "sdpa"), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backend", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [None, 5, 64, 65])
def test_gpu_backends_agree_with_the_oracle(window: int | None, lengths: tuple[int, ...], backend: str) -> None:
    gpu = torch.device("cuda", 0)
    oracle = attend(lengths, spec_of(window), "eager", gpu)  # float32
    out = attend(lengths, spec_of(window), backend, gpu, torch.bfloat16).float()
    assert (out - oracle).norm() / oracle.norm() < 1e-2


def test_backends_that_only_look_back_say_so() -> None:
    problem = problem_of([spec_of(None)], torch.empty(0))
    assert not problem.causal and problem_of([spec_of(None, causal=True)], torch.empty(0)).causal
    with pytest.raises(ValueError, match="has no attention to later tokens"):
        deterministic_backend(None, problem, reference().chunk_attention)
    assert choose_backend(None, problem).name == "sdpa"


@pytest.mark.parametrize("unbounded", [-1, None])
def test_how_packages_are_told(unbounded: int | None) -> None:
    """FlashAttention's versions write "no bound" as -1 or as None."""
    told: dict[str, Any] = {}

    def package(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
        window_size=(unbounded, unbounded),
    ):  # fmt: skip
        told.update(causal=causal, window_size=window_size)
        return q

    found = adapted(package, "here")
    assert BOTH_WAYS in found.can
    step = step_of((9,), "eager", CPU)
    for window, causal, expected in (
        (None, True, (unbounded, 0)),
        (5, True, (4, 0)),
        (None, False, (unbounded, unbounded)),
        (5, False, (4, 4)),
    ):
        found.attend(*inputs((9,), CPU, torch.float32), spec_of(window, causal), step, None)
        assert told == {"causal": causal, "window_size": expected}
