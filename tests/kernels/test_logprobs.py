"""logprobs: the reference against plain PyTorch and plain Python, and what it refuses."""

import math

import pytest
import torch

from cuformers.kernels.logprobs.reference import logprobs

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_is_log_softmax_with_the_best_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, 300) * 3).to(dtype)
    tokens = torch.tensor([0, 299, 7, 7, 100])
    out = logprobs(logits, tokens, 20)
    want = logits.float().log_softmax(-1)
    assert out.chosen.dtype == out.values.dtype == torch.float32
    assert out.rank.dtype == torch.int32 and out.ids.dtype == torch.int64
    assert torch.equal(out.chosen, want[range(5), tokens])
    assert torch.equal(out.values, want.topk(20).values) and torch.equal(want.gather(1, out.ids), out.values)
    for row, token in enumerate(tokens.tolist()):
        assert out.rank[row] == sum(x > logits[row, token].item() for x in logits[row].tolist())


def test_ties_go_to_the_smaller_id_and_nan_comes_last() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -INF, 3.0], [0.0, -0.0, NAN, 2.0, -INF], [-INF] * 5])
    out = logprobs(logits, torch.tensor([2, 1, 4]), 4)
    assert out.ids.tolist() == [[1, 2, 4, 0], [3, 0, 1, 2], [0, 1, 2, 3]]
    assert out.rank.tolist() == [0, 1, 0]
    assert out.values[0].isfinite().all() and out.values[1:].isnan().all() and out.chosen[1:].isnan().all()
    assert logprobs(logits, torch.tensor([3, 4, 0]), 0).chosen[0] == -INF


def test_skipped_rows_are_zero() -> None:
    out = logprobs(torch.randn(2, 9), torch.tensor([-1, 4]), 3)
    assert not any(x[0].any() for x in out) and out.values[1].all()
    assert logprobs(torch.randn(2, 9), torch.tensor([-1, 4]), 0).ids.shape == (2, 0)


def test_gradients_flow_as_through_log_softmax() -> None:
    logits = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    out = logprobs(logits, torch.tensor([3, 4]), 2)
    (grad,) = torch.autograd.grad(out.chosen.sum(), logits)
    want = -logits.detach().softmax(-1)
    want[[0, 1], [3, 4]] += 1
    torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top", [-1, 33, 10])
def test_refuses_more_than_there_are(top: int) -> None:
    with pytest.raises(ValueError, match=f"top={top} is not possible: allowed is 0 to"):
        logprobs(torch.randn(1, 9 if top == 10 else 50), torch.tensor([0]), top)
