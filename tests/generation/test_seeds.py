import random

import numpy
import pytest
import torch

from cuformers.base.seeding import set_seed
from cuformers.generation import row_seed, row_seeds


def test_one_seed_makes_many_that_differ() -> None:
    seeds = [s for seed in range(50) for s in row_seeds(seed, 200)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
    ones = numpy.mean([bin(s).count("1") for s in seeds])
    assert abs(ones - 31.5) < 0.2  # 63 fair bits


def test_a_row_does_not_depend_on_the_batch() -> None:
    assert row_seeds(7, 5) == row_seeds(7, 9)[:5]
    assert row_seeds(7, 5)[3] == row_seed(7, 3)
    assert row_seeds(-1, 2) == row_seeds(2**64 - 1, 2)


def test_split_mix_reference_values() -> None:
    # First outputs of SplitMix64 seeded with 0 and 1, as published with the algorithm; >> 1 makes them int63.
    from cuformers.generation.seeds import _mix

    assert _mix(0) == 0xE220A8397B1DCDAF
    assert _mix(1) == 0x910A2DEC89025CC1


def test_a_list_is_taken_as_it_is() -> None:
    assert row_seeds([3, 1, 2], 3) == [3, 1, 2]
    with pytest.raises(ValueError, match="a list of 2"):
        row_seeds([3, 1, 2], 2)


def test_none_follows_torch() -> None:
    torch.manual_seed(0)
    first = row_seeds(None, 4)
    second = row_seeds(None, 4)
    torch.manual_seed(0)
    assert row_seeds(None, 4) == first != second


def test_set_seed_repeats_everything() -> None:
    draws = []
    for _ in range(2):
        set_seed(123)
        draws.append((random.random(), numpy.random.rand(), torch.rand(1).item(), row_seeds(None, 1)))
    assert draws[0] == draws[1]
    with pytest.raises(ValueError, match="2\\*\\*32"):
        set_seed(-1)
