"""attention_plan: every key of every row is in one item, for any lengths, and there is always room."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuformers.kernels.attention_plan import ALONE, NEWEST, AttentionPlan
from cuformers.kernels.attention_plan.reference import attention_plan

LENGTHS = st.lists(st.one_of(st.integers(0, 70), st.integers(0, 20_000), st.just(131_072)), min_size=1, max_size=40)


def plan(lengths: list[int], **options) -> AttentionPlan:
    return attention_plan(torch.tensor(lengths, dtype=torch.int32), **({"num_kv_heads": 8, "num_sms": 132} | options))


def check(made: AttentionPlan, lengths: list[int], window: int | None) -> None:
    """Items cover the visible keys, once, in order; the flags and the list of split rows say what is so."""
    items = [tuple(i) for i in made.items.tolist()]
    used = [i for i in items if i[0] >= 0]
    assert items == used + [(-1, 0, 0, 0)] * (len(items) - len(used))
    split = {}
    for row, length in enumerate(lengths):
        places = [i for i, item in enumerate(used) if item[0] == row]
        assert places == list(range(places[0], places[0] + len(places)))
        pieces = [used[i] for i in places]
        bounds = [(begin, end) for _, begin, end, _ in pieces]
        assert bounds[0][0] == (0 if window is None else max(0, length - window)) and bounds[-1][1] == length
        assert all(left[1] == right[0] for left, right in pairwise(bounds))
        assert length == 0 or all(begin < end for begin, end in bounds)
        flags = [flag for *_, flag in pieces]
        assert [bool(flag & ALONE) for flag in flags] == [len(pieces) == 1] * len(pieces)
        assert [bool(flag & NEWEST) for flag in flags] == [False] * (len(pieces) - 1) + [True]
        if len(pieces) > 1:
            split[row] = (row, places[0], len(pieces), 0)
    none = [(-1, 0, 0, 0)] * (made.split_rows.shape[0] - len(split))
    assert [tuple(r) for r in made.split_rows.tolist()] == [*split.values(), *none]


@settings(deadline=None)
@given(
    lengths=LENGTHS,
    window=st.sampled_from([None, 1, 63, 64, 65, 1000]),
    block=st.sampled_from([16, 64]),
    num_kv_heads=st.sampled_from([1, 2, 8, 71]),
    num_sms=st.sampled_from([1, 20, 132]),
)
def test_every_key_is_in_one_item(
    lengths: list[int], window: int | None, block: int, num_kv_heads: int, num_sms: int
) -> None:
    made = plan(lengths, window=window, block=block, num_kv_heads=num_kv_heads, num_sms=num_sms)
    check(made, lengths, window)


@settings(deadline=None)
@given(lengths=LENGTHS, window=st.sampled_from([None, 1, 64, 1000]), stretch=st.sampled_from([64, 512]))
def test_fixed_stretches_depend_on_their_own_row_only(
    lengths: list[int], window: int | None, stretch: int
) -> None:
    made = plan(lengths, window=window, stretch=stretch, longest=131_072)
    check(made, lengths, window)
    for row, length in enumerate(lengths):
        alone = plan([length], window=window, stretch=stretch, longest=131_072)
        mine = made.items[made.items[:, 0] == row]
        assert torch.equal(mine[:, 1:], alone.items[alone.items[:, 0] == 0][:, 1:])
        assert ((mine[:, 2] - mine[:, 1]) <= stretch).all()


def test_a_long_row_is_cut_to_what_the_others_are() -> None:
    lengths = [131_072, *[4096] * 31]
    items = plan(lengths).items
    sizes = (items[:, 2] - items[:, 1])[items[:, 0] >= 0]
    assert sizes.max() <= 1.05 * sum(lengths) / 99 + 64
    assert (sizes.diff() <= 64).all(), "the longest come first, to a block"


def test_whole_rows_that_fill_the_card_stay_whole() -> None:
    assert (plan([200] * 32).split_rows[:, 0] < 0).all()
    assert (plan([1536] * 256).split_rows[:, 0] < 0).all()
    assert (plan([200]).items[:, 0] >= 0).sum() == 4


def test_sizes_depend_on_no_length() -> None:
    assert all(a.shape == b.shape for a, b in zip(plan([1, 5]), plan([100_000, 3])))


def test_refusals_name_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"stretch=100.*multiple of block=64"):
        plan([5], stretch=100, longest=10)
    with pytest.raises(ValueError, match=r"longest=None.*bound the work"):
        plan([5], stretch=128)
