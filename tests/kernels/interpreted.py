"""The Triton kernels in Triton's CPU interpreter. Run by test_interpreter.py in a process of its own."""

import pytest
import torch

from .attention_cases import DecodeShape, RopeShape
from .cases import all_cases, check_sampling
from .fp8_cases import DECODES, WRITES, check_decode, check_write
from .judge import Case, check
from .logprobs_cases import check_logprobs
from .loss_cases import (
    SMALL_HEADS,
    WAYS,
    HeadShape,
    check_loss_gradients,
    check_losses_twice,
    check_losses_under_autocast,
)
from .moe_cases import SMALL, ExpertShape, check_gradients, check_order
from .penalty_cases import check_penalties

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts that the interpreter, slow by the program, can walk through, with several splits of everything."""
    from cuformers.kernels.attention_plan import triton as plan
    from cuformers.kernels.chunk_attention import triton as chunks
    from cuformers.kernels.experts import few
    from cuformers.kernels.experts.config import FewConfig
    from cuformers.kernels.layer_norm import triton as layer_norm
    from cuformers.kernels.linear import skinny
    from cuformers.kernels.linear.config import FmaConfig
    from cuformers.kernels.linear_cross_entropy import chunks as loss
    from cuformers.kernels.logprobs import triton as logprobs
    from cuformers.kernels.paged_attention import triton as attention
    from cuformers.kernels.penalize import triton as penalize
    from cuformers.kernels.sample import triton as sample
    from cuformers.kernels.speculate import triton as drafts

    monkeypatch.setattr(skinny, "fma_config", lambda *_, **__: FmaConfig(8, 256, 4))
    monkeypatch.setattr(few, "few_up", lambda *_: FewConfig(16, 256, 4))
    monkeypatch.setattr(few, "few_down", lambda *_: FewConfig(16, 256, 4, at_once=2))
    monkeypatch.setattr(attention, "config", lambda N, *_, **__: attention.AttentionConfig(16, 4, 2, N < 3))
    monkeypatch.setattr(layer_norm, "config", lambda *_: layer_norm.LayerNormConfig(2, 3, 4))
    monkeypatch.setattr(plan, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(chunks, "config", lambda _, group, *__: chunks.ChunkConfig(64 if group > 32 else 32, 32, 4, 2))
    monkeypatch.setattr(sample, "SPLIT", 128)
    monkeypatch.setattr(sample, "CANDIDATES", 16)
    monkeypatch.setattr(sample, "STRIPE", 8)
    monkeypatch.setattr(sample, "BINS", 32)
    monkeypatch.setattr(drafts, "BLOCK", 16)
    monkeypatch.setattr(drafts, "SHARE", 40)
    monkeypatch.setattr(drafts, "TABLE_BLOCK", 4)
    monkeypatch.setattr(loss, "CHUNK_BYTES", 40_000)
    monkeypatch.setattr(loss, "TILE", 8)
    monkeypatch.setattr(loss, "BLOCK", 128)
    monkeypatch.setattr(logprobs, "SPLIT", 128)
    monkeypatch.setattr(logprobs, "GROUP", 8)
    monkeypatch.setattr(penalize, "SPLIT", 128)
    monkeypatch.setattr(penalize, "SPAN", 16)
    monkeypatch.setattr(penalize, "SHARES", 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_matches_the_reference(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", WRITES, ids=str)
def test_tokens_are_written_in_fp8(shape: RopeShape, dtype: torch.dtype) -> None:
    check_write(shape, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", DECODES, ids=str)
def test_decoding_reads_the_fp8_key_that_it_has_written(shape: DecodeShape, dtype: torch.dtype) -> None:
    check_decode(shape, dtype, CPU)


@pytest.mark.parametrize(
    ("spread", "dtype", "room"),
    [(0.5, torch.float32, 32), (3.0, torch.bfloat16, 32), (0.5, torch.float16, 256)],
    ids=str,
)
def test_sampling_matches_the_reference(
    spread: float, dtype: torch.dtype, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little room, the decisive bins of flat rows do not fit it."""
    from cuformers.kernels.sample import triton as sample

    monkeypatch.setattr(sample, "ROOM", room)
    check_sampling(250, spread, dtype, CPU, draws=1)


@pytest.mark.parametrize(
    ("num_tokens", "top", "dtype"),
    [(300, 0, torch.float32), (300, 5, torch.float32), (37, 32, torch.bfloat16), (300, 20, torch.bfloat16),
     (299, 1, torch.float16)],
    ids=str,
)  # fmt: skip
def test_logprobs_match_the_reference(num_tokens: int, top: int, dtype: torch.dtype) -> None:
    check_logprobs(num_tokens, top, dtype, CPU)


@pytest.mark.parametrize(
    ("num_tokens", "longest", "dtype"),
    [(300, 90, torch.float32), (40, 150, torch.bfloat16), (300, 60, torch.float16)],
    ids=str,
)
def test_penalties_match_the_reference(num_tokens: int, longest: int, dtype: torch.dtype) -> None:
    check_penalties(num_tokens, longest, dtype, CPU)


@pytest.mark.parametrize(("P", "E", "block_m"), [(1, 3, 16), (300, 16, 16), (1100, 20, 64), (1500, 3, 128)])
def test_pairs_are_sorted_by_expert(P: int, E: int, block_m: int) -> None:
    check_order(P, E, block_m, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_gradients_of_the_experts_are_the_references(shape: ExpertShape, dtype: torch.dtype) -> None:
    check_gradients(shape, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SMALL_HEADS, ids=str)
def test_gradients_of_losses_are_the_references(shape: HeadShape, way: str, dtype: torch.dtype) -> None:
    check_loss_gradients(shape, way, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_are_the_same_in_two_passes(dtype: torch.dtype) -> None:
    check_losses_twice(dtype, CPU)


def test_losses_under_autocast() -> None:
    check_losses_under_autocast(CPU)


def test_a_label_that_is_no_token_has_no_loss() -> None:
    """On a GPU, where nobody looks at labels before; no memory outside of the logits is touched."""
    from cuformers.kernels.linear_cross_entropy import chunks

    torch.manual_seed(0)
    x, weight, labels = torch.randn(4, 16), torch.randn(300, 16), torch.tensor([2**40, 5, -7, 300])
    head = chunks.Head(scale=1.0, softcap=None, ignore_index=-100)
    wanted = chunks.Wanted(x=True, weight=True)
    nll, entropy, gradients = chunks.losses_and_gradients(x, weight, labels, head, True, torch.ones(4), None, wanted)
    assert entropy is not None and gradients.x is not None
    for found in (nll, entropy, gradients.x.sum(1)):
        assert found.isnan().tolist() == [True, False, True, True]
