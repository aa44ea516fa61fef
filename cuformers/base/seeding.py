"""One seed for the whole process."""

import random

from cuformers.base.errors import bad_argument


def set_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators (all GPUs), so that a program repeats its random choices.

    Args:
        seed: from 0 to 2**32 - 1, NumPy's range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise bad_argument("seed", seed, "an integer from 0 to 2**32 - 1")
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
