"""Speculative decoding: what it emits against decoding step by step, the lookup against a search in plain Python."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cuformers.kernels.advance import DecodeState
from cuformers.kernels.advance.reference import advance
from cuformers.kernels.speculate import DraftRows
from cuformers.kernels.speculate.reference import accept, draft_lookup, spread_drafts
from cuformers.kernels.speculate.triton import SHARE, shares

from .speculate_cases import Row, drafting, state_of

CPU = torch.device("cpu")
WIDTH = 60
Model = Callable[[tuple[int, ...]], int]

contexts = st.lists(st.integers(0, 2), min_size=1, max_size=30).map(tuple)


def found(context: tuple[int, ...], count: int, longest: int) -> list[int]:
    """The drafts, by comparing slices."""
    for n in range(min(longest, len(context) - 1), 0, -1):
        for end in range(len(context) - 1, n - 1, -1):
            if context[end - n : end] == context[-n:]:
                period = context[end:]
                return [period[j % len(period)] for j in range(count)]
    return [-1] * count


@given(st.lists(contexts | st.just(()), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 5))
def test_lookup_takes_the_last_of_the_longest_matches(rows: list, count: int, longest: int) -> None:
    state = state_of([Row(c, 50) for c in rows], groups=1, page=4, width=WIDTH)
    assert draft_lookup(state, count, longest).tolist() == [found(c, count, longest) for c in rows]


@dataclass(frozen=True)
class Problem:
    """Rows, and a model that says the next token from all tokens so far."""

    rows: list[Row]
    groups: int
    page: int
    count: int
    longest: int
    model: Model


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    def row(context: tuple[int, ...]) -> Row:
        limit = len(context) + draw(st.integers(1, WIDTH - len(context)))
        return Row(context, limit, tuple(draw(st.lists(st.integers(0, 9), max_size=2))))

    rows = [row(c) if c else Row() for c in draw(st.lists(contexts | st.just(()), min_size=1, max_size=3))]
    order, vocabulary, seed = draw(st.integers(0, 3)), draw(st.integers(1, 5)), draw(st.integers(0, 999))

    def model(seen: tuple[int, ...]) -> int:
        """Of order 0 it goes by everything it sees; of a higher one its text soon repeats itself."""
        return hash((seed, seen[-order:])) % 10_007 % vocabulary

    groups, page = draw(st.integers(1, 3)), draw(st.sampled_from([1, 4, 16]))
    return Problem(rows, groups, page, draw(st.integers(1, 6)), draw(st.integers(1, 4)), model)


def step_by_step(row: Row, model: Model) -> list[int]:
    """What a row says without drafts."""
    seen = list(row.context)
    while seen and len(seen) < row.limit and not (len(seen) > len(row.context) and seen[-1] in row.eos):
        seen.append(model(tuple(seen)))
    return seen[len(row.context) :]


def fed(rows: DraftRows, pools: Tensor, page: int, model: Model) -> Tensor:
    """Writes each row's token where its slot says, then asks the model about the keys that each row sees."""
    running = rows.lengths > 0
    for pool, slots in zip(pools, rows.slots):
        assert (slots >= 0).equal(running) and len(slots[running].unique()) == running.sum()
        pool[slots[running].long()] = rows.tokens[running]
    sampled = torch.full_like(rows.tokens, 4242)
    for r in running.nonzero()[:, 0].tolist():
        index = torch.arange(int(rows.lengths[r]))
        assert rows.positions[r] == rows.lengths[r] - 1
        seen = {
            tuple(pool[table[r, index // page].long() * page + index % page].tolist())
            for pool, table in zip(pools, rows.block_tables)
        }
        sampled[r] = model(*seen)
    return sampled


def cached(state: DecodeState) -> Tensor:
    """Pools [G, slots] that hold the tokens of each row's history but the last; -9 elsewhere."""
    pools = torch.full((len(state.block_tables), (int(state.block_tables.max()) + 1) * state.page_size), -9)
    for pool, tables in zip(pools, state.block_tables):
        for history, table, length in zip(state.history, tables, state.lengths.tolist()):
            index = torch.arange(max(length - 1, 0))
            slots = table[index // state.page_size].long() * state.page_size + index % state.page_size
            pool[slots] = history[index].long()
    return pools


@settings(deadline=None)
@given(problems())
def test_says_what_it_says_without_drafts(problem: Problem) -> None:
    state = state_of(problem.rows, groups=problem.groups, page=problem.page, width=WIDTH)
    pools, said, steps = cached(state), [[] for _ in problem.rows], 0
    while state.lengths.any():
        busy = state.lengths > 0
        drafts = draft_lookup(state, problem.count, problem.longest)
        sampled = fed(spread_drafts(state, drafts), pools, problem.page, problem.model)
        emitted = accept(sampled.view(len(drafts), -1), drafts, state)
        assert (emitted[:, 0] >= 0).equal(busy)
        for tokens, new in zip(said, emitted.tolist()):
            tokens += [t for t in new if t >= 0]
        steps += 1
    expected = [step_by_step(row, problem.model) for row in problem.rows]
    assert said == expected and steps <= max(map(len, expected), default=0)
    for row, tokens, history in zip(problem.rows, expected, state.history.tolist()):
        assert history[: len(row.context) + len(tokens)] == [*row.context, *tokens]


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    """Else the test above could pass with drafts that never hold."""
    context = (1, 2, 3, 4, 5, 6, 7, 1, 2)
    state = state_of([Row(context, 30)], groups=1, page=4, width=WIDTH)
    pools, steps = cached(state), 0
    while state.lengths.any():
        drafts = draft_lookup(state, 4)
        sampled = fed(spread_drafts(state, drafts), pools, 4, lambda seen: seen[-1] % 7 + 1)
        accept(sampled.view(1, -1), drafts, state)
        steps += 1
    assert steps == 5  # 21 tokens, 5 a step
    assert state.history[0, :30].tolist() == [i % 7 + 1 for i in range(30)]


@pytest.mark.parametrize("count", [1, 4, 7])
def test_accept_leaves_the_state_that_advance_leaves(count: int) -> None:
    torch.manual_seed(count)
    state, drafts, sampled = drafting(count, 200, CPU)
    one_by_one = state._replace(**{name: x.clone() for name, x in state.tensors()})
    emitted = accept(sampled, drafts, state)
    for token in emitted.unbind(1):
        advance(token, one_by_one, torch.arange(200).int().masked_fill(token < 0, -1))
    assert all(x.equal(y) for (_, x), (_, y) in zip(state.tensors(), one_by_one.tensors()))
    counts = (emitted >= 0).sum(1)
    assert set(counts.tolist()) == set(range(count + 2))


def test_what_can_not_be_used_does_not_run() -> None:
    rows = [Row((5, 6, 7), 6), Row(), Row((5, 6), 50), Row((1, 2, 3, 4), 50)]
    state = state_of(rows, groups=2, page=4, width=WIDTH)
    drafts = torch.tensor([[8, 9, 7], [1, 1, 1], [-1, 3, -1], [5, 6, -1]])
    out = spread_drafts(state, drafts)
    assert out.tokens.view(4, 4).tolist() == [[7, 8, 9, 0], [0] * 4, [6, 0, 0, 0], [4, 5, 6, 0]]
    assert out.lengths.view(4, 4).tolist() == [[3, 4, 5, 0], [0] * 4, [2, 0, 0, 0], [4, 5, 6, 0]]
    assert out.positions.equal((out.lengths - 1).clamp(min=0))
    last = state.block_tables[:, 3]
    assert out.slots[:, 12:].T.tolist() == [
        (last[:, 0] * 4 + 3).tolist(), (last[:, 1] * 4).tolist(), (last[:, 1] * 4 + 1).tolist(), [-1, -1],
    ]  # fmt: skip
    assert out.block_tables[:, 12:].equal(last[:, None].expand(-1, 4, -1))


def test_many_rows_or_a_short_history_are_searched_by_one_program_each() -> None:
    assert shares(1, SHARE, 132) == shares(256, 100_000, 132) == shares(133, 100_000, 132) == 1
    assert shares(1, 10 * SHARE, 132) == 10 and shares(32, 10 * SHARE, 132) == 4
