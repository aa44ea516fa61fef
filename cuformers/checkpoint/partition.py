"""A row of loads cut into consecutive runs, one for each bin: plain integers, no devices."""

from collections.abc import Sequence


def fill(loads: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """The bin of each load when bins are filled one after the other; None where the row does not fit.

    Filling each bin as far as it goes before the next begins fits whenever any cut into consecutive runs does.
    """
    bins, here, used = [], 0, 0
    for load in loads:
        while here < len(capacities) and used + load > capacities[here]:
            here, used = here + 1, 0
        if here == len(capacities):
            return None
        bins.append(here)
        used += load
    return bins


def balance(loads: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """As `fill`, but with the fullest bin as empty as consecutive runs allow."""

    def at_most(limit: int) -> list[int] | None:
        return fill(loads, [min(limit, capacity) for capacity in capacities])

    limit = _least(sum(loads), lambda limit: at_most(limit) is not None)
    return None if limit is None else at_most(limit)


def balance_low_first(loads: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """As `balance`, but the first bin takes only what the others can't."""
    first, others = capacities[0], list(capacities[1:])
    least = _least(first, lambda limit: fill(loads, [limit, *others]) is not None)
    if least is None:
        return None

    def at_most(limit: int) -> list[int] | None:
        return fill(loads, [least, *(min(limit, capacity) for capacity in others)])

    limit = _least(sum(loads), lambda limit: at_most(limit) is not None)
    assert limit is not None, "what fits into full bins fits into bins of the whole sum"
    return at_most(limit)


def _least(high: int, works) -> int | None:
    """The least number in 0..high for which `works` is true, given that it stays true from there on."""
    if not works(high):
        return None
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle + 1, high)
    return low
