"""A seed for each row of a batch, whose draws then depend on nothing else."""

from collections.abc import Sequence

from cuformers.base.errors import bad_argument

_MASK = (1 << 64) - 1


def row_seed(seed: int, row: int) -> int:
    """The seed of one row of a batch, from the seed of the call: 0 to 2**63 - 1.

    Mixes with SplitMix64 (Steele, Lea and Flood 2014), so that neighbouring seeds and rows share nothing.
    """
    return _mix(_mix(seed & _MASK) + row * 0x9E3779B97F4A7C15) >> 1


def row_seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """One seed for each row, each from 0 to 2**63 - 1: a row's draws depend on its seed and position alone.

    Args:
        seed: an int, from which each row's is derived; a list with one for each row, taken as they are (modulo
            2**63); or None, which draws them from torch's global generator, so that torch.manual_seed repeats them.
        rows: rows of the batch, times num_return_sequences.

    Raises:
        ValueError: a list of another length.
    """
    if seed is None:
        import torch

        return torch.randint(0, (1 << 63) - 1, (rows,), dtype=torch.int64).tolist()
    if isinstance(seed, int):
        return [row_seed(seed, row) for row in range(rows)]
    if len(seed) != rows:
        raise bad_argument("seed", list(seed), f"one integer, or a list of {rows}, one for each row")
    return [int(s) & (_MASK >> 1) for s in seed]


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
