"""linear_cross_entropy: the reference against plain formulas, what it refuses, and how tokens are cut into chunks."""

import pytest
import torch
from torch.nn import functional as F

from cuformers.kernels.linear_cross_entropy.reference import linear_cross_entropy


def test_is_cross_entropy_of_the_bent_logits() -> None:
    torch.manual_seed(0)
    x, weight, labels = torch.randn(6, 8), torch.randn(50, 8), torch.tensor([3, -100, 49, 0, -100, 7])
    weights = torch.tensor([1.0, 5.0, 0.5, -1.0, 2.0, 0.0])
    z = torch.tanh(x @ weight.T * 0.5 / 2) * 2
    p = z.softmax(-1)
    out = linear_cross_entropy(x, weight, labels, weights, scale=0.5, softcap=2.0, entropy=True)
    kept = labels >= 0
    nll = torch.stack([-p[i, labels[i]].log() if kept[i] else torch.tensor(0.0) for i in range(6)])
    torch.testing.assert_close(out.nll, nll)
    torch.testing.assert_close(out.total, (weights * nll).sum())
    assert out.entropy is not None
    torch.testing.assert_close(out.entropy, torch.special.entr(p).sum(1) * kept)
    plain = linear_cross_entropy(x, weight, labels)
    torch.testing.assert_close(plain.total, F.cross_entropy(x @ weight.T, labels, reduction="sum"))
    assert plain.entropy is None


def test_ignored_tokens_have_no_gradient() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    out = linear_cross_entropy(x, weight, torch.full((3,), 7), entropy=True, ignore_index=7)
    assert not out.nll.any() and out.entropy is not None and not out.entropy.any()
    (out.total + out.nll.sum() + out.entropy.sum()).backward()
    assert x.grad is not None and not x.grad.any() and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("labels, says", [
    (torch.tensor([0, 50]), r"labels=50 is not possible: allowed is tokens from 0 to 49, or -100"),
    (torch.tensor([-1, 0]), r"labels=-1 is not possible"),
    (torch.tensor([0.0, 1.0]), r"labels=.*float32.* integers"),
    (torch.tensor([[0, 1]]), r"labels=.*\(1, 2\).* integers of shape \[T\]"),
])  # fmt: skip
def test_labels_that_are_no_tokens_are_refused(labels: torch.Tensor, says: str, name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
        from cuformers.kernels.linear_cross_entropy.triton import linear_cross_entropy as function
    else:
        function = linear_cross_entropy
    with pytest.raises(ValueError, match=says):
        function(torch.randn(2, 8), torch.randn(50, 8), labels)


@pytest.mark.parametrize("num_rows, row_bytes, expected", [
    (16_384, 131_072 * 2, 4096),
    (8192, 151_936 * 2, 2816),
    (100, 151_936 * 2, 128),
    (5, 1 << 29, 2),
    (5, 1 << 31, 1),
])  # fmt: skip
def test_chunks_fit_their_memory(num_rows: int, row_bytes: int, expected: int) -> None:
    pytest.importorskip("triton")
    from cuformers.kernels.linear_cross_entropy.chunks import CHUNK_BYTES, chunk_rows

    assert chunk_rows(num_rows, row_bytes) == expected
    assert expected * row_bytes <= CHUNK_BYTES or expected == 1
