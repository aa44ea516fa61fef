"""Logits processing of rows of any lengths: each row as if alone, whatever the bound; rectangular ones in step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cuformers.engine.capacity import Capacity
from cuformers.engine.group import Group
from cuformers.engine.request import Request
from cuformers.engine.state import idle_rows, write_rows
from cuformers.generation.logits_processors import PrefixConstrainedLogitsProcessor, RepetitionPenaltyLogitsProcessor
from cuformers.generation.processors import LogitsProcessor, RowProcessor
from cuformers.kernels.advance import DecodeState
from tests.generation.oracle import VOCAB, random_ids, random_scores
from tests.generation.test_no_sync import PROCESSORS, Watch

SIZES = ((4, 2), (1, 0), (7, 9), (2, 5), (4, 5))
"""(prompt, generated) tokens of each row."""
PAD = 3


def make_requests(sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Request]:
    made = []
    for i, (prompt, generated) in enumerate(sizes):
        ids = random_ids(1, prompt + generated, vocab=10, seed=i)[0].tolist()
        made.append(Request(prompt=ids[:prompt], max_new_tokens=30, generated=ids[prompt:]))
    return made


def state_of(requests: list[Request]) -> DecodeState:
    """Their rows; what lies behind a row's tokens is no token of it."""
    table = idle_rows(Capacity(rows=8, length=64, pages=8, eos=2), 1, 16, torch.device("cpu"))
    table.decode.history.fill_(5)
    for row, request in enumerate(requests):
        request.row = row
    write_rows(table, requests)
    return table.decode.rows(0, len(requests))


def bound_of(requests: list[Request]) -> int:
    return max(len(r.context) for r in requests)


def counts_of(requests: list[Request]) -> list[int]:
    return [len(r.generated) for r in requests]


@pytest.mark.parametrize("make", PROCESSORS)
def test_rows_of_any_lengths_are_as_if_alone(make: Callable[[], RowProcessor]) -> None:
    requests, logits = make_requests(), random_scores(len(SIZES))
    bound = bound_of(requests)
    together = [Group(processors=[make()]).process(logits, state_of(requests), requests, b) for b in (bound, 40, 500)]
    assert torch.equal(together[0], together[1]) and torch.equal(together[0], together[2])
    for row, request in enumerate(requests):
        alone = Group(processors=[make()]).process(
            logits[row : row + 1], state_of([request]), [request], len(request.context)
        )
        torch.testing.assert_close(together[0][row : row + 1], alone, rtol=1e-6, atol=1e-6)


class Record(LogitsProcessor):
    """Keeps what it was given, and adds each row's tokens to its first scores."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.dtype == torch.int64
        self.calls.append(input_ids.tolist())
        scores[:, 0] += input_ids.sum(1)  # in place, as users' processors may
        return scores


def padded(request: Request, width: int) -> list[int]:
    return [PAD] * (width - len(request.prompt)) + request.context


def test_rectangular_rows_go_together_where_they_are_in_step() -> None:
    """Among processors for ragged rows, and without a trace in the logits that are kept."""
    requests, logits = make_requests(), random_scores(len(SIZES))
    record, before = Record(), logits.clone()
    group = Group(
        processors=[RepetitionPenaltyLogitsProcessor(1.5), record], pad=PAD, width=7, keep_logits=True, keep_scores=True
    )
    scores = group.process(logits, state_of(requests), requests, 50, counts_of(requests))
    first, second, third, fourth, fifth = (padded(r, 7) for r in requests)
    assert record.calls == [[second], [first], [fourth, fifth], [third]]
    plain = Group(processors=[RepetitionPenaltyLogitsProcessor(1.5)])
    want = plain.process(logits, state_of(requests), requests, 50)
    want[:, 0] += torch.tensor([sum(padded(r, 7)) for r in requests])
    assert torch.equal(scores, want) and torch.equal(logits, before)
    for row, request in enumerate(requests):
        trace = group.traces[request]
        assert torch.equal(torch.stack(trace.logits), before[row : row + 1])
        assert torch.equal(torch.stack(trace.scores), want[row : row + 1])


def test_rectangular_rows_keep_their_number_in_the_call() -> None:
    """The second row has ended and the last has not begun; the others are in another order than in the call."""
    first, ended, third, later = make_requests(((4, 3), (2, 2), (3, 3), (5, 0)))
    allowed = {0: [11], 1: [12], 2: [13], 3: [14]}
    seen: list[tuple[int, list[int]]] = []

    def ask(row: int, ids: Tensor) -> list[int]:
        seen.append((row, ids.tolist()))
        return allowed[row]

    group = Group(
        processors=[PrefixConstrainedLogitsProcessor(ask)], pad=PAD, width=5, batch=[first, ended, third, later]
    )
    now = [third, first]
    scores = group.process(random_scores(2), state_of(now), now, 8, [3, 3])
    assert scores.argmax(1).tolist() == [13, 11] and scores.isinf().sum() == 2 * (VOCAB - 1)
    whole = [padded(first, 5), [*padded(ended, 5), PAD], padded(third, 5), [*later.prompt, PAD, PAD, PAD]]
    assert seen == list(enumerate(whole))


def test_a_rectangular_group_must_be_told_what_was_generated() -> None:
    requests = make_requests()
    group = Group(processors=[Record()], width=7)
    assert group.rectangular and not Group(processors=[RepetitionPenaltyLogitsProcessor(1.5)]).rectangular
    with pytest.raises(AssertionError, match="Record needs to know"):
        group.process(random_scores(len(SIZES)), state_of(requests), requests, 50)


def test_asks_the_device_for_no_value() -> None:
    requests = make_requests()
    group = Group(processors=[make() for make in PROCESSORS], keep_logits=True, keep_scores=True)
    state, logits = state_of(requests), random_scores(len(SIZES))
    group.process(logits, state, requests, 40)  # tables are laid out in the first call
    with Watch() as watch:
        group.process(logits, state, requests, 40)
        Group(processors=[lambda ids, scores: scores], width=7, batch=[*requests, *make_requests()]).process(  # type: ignore[list-item]
            logits, state, requests, 40, counts_of(requests)
        )
    assert watch.waits == []
