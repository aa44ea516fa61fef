"""How long a stretch is, and how many items there can be: numbers that the host knows before any length.

With B visible blocks in all rows together, a stretch has

    max(least, min(ceil(B / wave), long), ceil(B / most))

blocks: as many stretches as run at once, unless that makes them longer than `long`; then shorter ones in several waves,
whose ends even out, but no more than `most`. A row of b blocks has max(1, ceil(b / stretch)) items, hence all rows no
more than N + most, of which fewer than `most` rows have two or more.
"""

from typing import NamedTuple

from cuformers.base.errors import bad_argument

PER_SM = 3
"""Attention programs that a multiprocessor holds at once."""
WAVES = 4
"""Rounds of programs at the most, beyond one program for each row, where rows fill the card by themselves. Fewer rows
get fewer: programs without work, of which a short batch has many, put off the kernels behind them."""
LONG = 16
"""Blocks of a stretch from which on several waves are better than one."""
LEAST_OF_MANY = 4
"""Blocks of a stretch at the least where whole rows fill the card: merging costs more than a few keys."""
UNLIMITED = 2**30


class Rule(NamedTuple):
    """The constants of a plan."""

    wave: int
    """Items that run at the same time."""
    most: int
    """Items at the most, beyond one for each row."""
    long: int
    """Blocks of a stretch that are enough to leave the first wave."""
    least: int
    """Blocks of a stretch at the least."""
    num_items: int
    """I: rows of `AttentionPlan.items`."""
    num_split_rows: int
    """R: rows of `AttentionPlan.split_rows`."""


def choose(
    N: int, *, num_kv_heads: int, window: int | None, block: int, stretch: int | None, longest: int | None, num_sms: int
) -> Rule:
    """The rule of a call of the op.

    Raises:
        ValueError: the stretch is not made of blocks, or `longest` is missing.
    """
    assert N > 0, "a plan is of one row at least"
    if stretch is None:
        return balanced(N, num_kv_heads, num_sms)
    if stretch < block or stretch % block:
        raise bad_argument("stretch", stretch, f"a multiple of block={block}")
    if longest is None:
        raise bad_argument("longest", longest, "the most keys of a row", "A fixed stretch needs it to bound the work.")
    # A window covers a part of one more block.
    visible = longest if window is None else min(longest, window + block)
    return fixed(N, stretch // block, -(-visible // block))


def balanced(N: int, num_kv_heads: int, num_sms: int) -> Rule:
    """Stretches of equal length over the whole batch.

    Example:
        >>> balanced(1, 8, 132)
        Rule(wave=49, most=49, long=16, least=1, num_items=50, num_split_rows=1)
    """
    wave = max(1, PER_SM * num_sms // num_kv_heads)
    waves = min(WAVES, -(-N * num_kv_heads // num_sms))
    most = max(1, waves * PER_SM * num_sms // num_kv_heads)
    least = 1 if N * num_kv_heads <= num_sms else LEAST_OF_MANY
    return Rule(wave, most, LONG, least, N + most, min(N, most))


def fixed(N: int, stretch: int, longest: int) -> Rule:
    """Stretches of at most `stretch` blocks in every row of at most `longest` blocks, whatever else is in the batch.

    Example:
        >>> fixed(2, 8, 20)[2:]
        (8, 8, 6, 2)
    """
    return Rule(UNLIMITED, UNLIMITED, stretch, stretch, N * max(1, -(-longest // stretch)), N)
