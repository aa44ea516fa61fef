"""The filters take one parameter a row; a row gets what it gets alone, and a neutral value leaves it as it is."""

from collections.abc import Callable

import pytest
import torch

from cuformers.generation import warpers

from .oracle import assert_same_scores, random_scores

CASES: list[tuple[Callable, list[float], float]] = [
    (warpers.temperature, [0.5, 2.0, 1.0], 0.0),
    (warpers.top_p, [0.0, 0.4, 0.9], 1.0),
    (warpers.min_p, [0.5, 0.1, 1.0], 0.0),
    (warpers.typical, [0.2, 0.5, 0.9], 1.0),
    (warpers.epsilon, [0.1, 0.01, 0.5], 0.0),
    (warpers.eta, [0.1, 0.01, 0.5], 0.0),
    (warpers.top_h, [0.2, 0.5, 0.9], 1.0),
]


@pytest.mark.parametrize(("function", "values", "neutral"), CASES)
def test_one_number_a_row(function: Callable, values: list[float], neutral: float) -> None:
    scores = random_scores(len(values) + 1)
    together = function(scores, torch.tensor([*values, neutral]))
    for i, value in enumerate(values):
        assert_same_scores(together[i : i + 1], function(scores[i : i + 1], value))
    assert torch.equal(together[-1], scores[-1])


def test_top_k_a_row() -> None:
    scores = random_scores(5)
    together = warpers.top_k(scores, torch.tensor([1, 3, 0, 50, 1000], dtype=torch.int32))
    assert together.isfinite().sum(-1).tolist() == [1, 3, 50, 50, 50]
    assert_same_scores(together[1:2], warpers.top_k(scores[1:2], 3))
