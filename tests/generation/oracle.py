"""Random histories and scores, and Transformers as the oracle."""

import torch
from torch import Tensor

VOCAB = 50


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_ids(rows: int, length: int, *, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=generator(seed))


def random_scores(rows: int, *, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=generator(seed + 1000)) * spread


def assert_same_scores(ours: Tensor, theirs: Tensor) -> None:
    """Equal infinities, and finite values to float32's rounding."""
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.isinf(), theirs.isinf()), (ours.isinf() != theirs.isinf()).nonzero()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)
