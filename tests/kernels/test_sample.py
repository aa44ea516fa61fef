"""Sampling: the reference's filters against Transformers', its random bits against the published ones."""

import pytest
import torch

from cuformers.kernels.sample.philox import gumbel, philox
from cuformers.kernels.sample.reference import argmax, sample, scale, thresholds

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """The vectors that come with Random123 (kat_vectors, philox4x32 10)."""
    got = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(w.item() for w in got) == words


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel(torch.tensor([3]), torch.tensor([5]), 200_000)[0].double().sort().values
    cdf = torch.exp(-torch.exp(-noise))
    rank = (torch.arange(len(noise), dtype=torch.float64) + 0.5) / len(noise)
    assert (cdf - rank).abs().max() < 1.63 / len(noise) ** 0.5  # Kolmogorov-Smirnov at 1%


def processed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """What Transformers' processors leave, in their order."""
    warpers = pytest.importorskip("transformers")
    scores = warpers.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = warpers.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = warpers.TopPLogitsWarper(top_p)(None, scores)
    return warpers.MinPLogitsWarper(min_p)(None, scores) if min_p else scores


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize(
    "setting",
    [
        (0.7, 20, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.5, 0, 1.0, 0.05),
        (0.6, 20, 0.95, 0.01),
        (1.0, 5000, 0.5, 0.2),
        (1.0, 0, 0.0, 0.0),
    ],
)
def test_keeps_what_transformers_keeps(setting: tuple[float, int, float, float], spread: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 1000) * spread
    columns = [torch.full((8,), x) for x in setting]
    columns[1] = columns[1].int()
    kept = scale(logits, columns[0]) >= thresholds(logits, *columns)[:, None]
    assert torch.equal(kept, processed(logits, *setting) > -torch.inf)


def test_ties_of_the_kth_value_all_stay() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    one, off = torch.ones(1), torch.zeros(1)
    assert thresholds(logits, one, torch.tensor([2], dtype=torch.int32), one, off).item() == 2.0


def test_frequencies_follow_the_kept_distribution() -> None:
    draws = 20_000
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0]]).expand(draws, -1)
    row = torch.ones(draws)
    tokens = sample(logits, row, row.int() * 4, row, row * 0, torch.full((draws,), 11), torch.arange(draws))
    share = torch.bincount(tokens, minlength=5) / draws
    want = torch.cat((logits[0, :4].softmax(-1), torch.zeros(1)))
    assert ((share - want).abs() < 4 * (want * (1 - want) / draws).sqrt() + 1e-9).all()


def test_a_token_depends_on_its_own_row_alone() -> None:
    torch.manual_seed(0)
    logits, seeds, positions = torch.randn(6, 100), torch.arange(6) * 3, torch.arange(6) + 2**33
    row = torch.ones(6)
    settings = (row, row.int() * 0, row * 0.9, row * 0)
    together = sample(logits, *settings, seeds, positions)
    alone = [
        sample(logits[i : i + 1], *(s[:1] for s in settings), seeds[i : i + 1], positions[i : i + 1]) for i in range(6)
    ]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(together, sample(logits, *settings, seeds, positions + 1))


def test_greedy_rows_and_argmax() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [torch.nan, 0.0, -1.0], [torch.nan] * 3])
    assert argmax(logits).tolist() == [1, 1, 0]
    zero, one = torch.zeros(3), torch.ones(3)
    ints = torch.zeros(3, dtype=torch.int64)
    assert sample(logits, zero, zero.int(), one, zero, ints, ints).tolist() == [1, 1, 0]
