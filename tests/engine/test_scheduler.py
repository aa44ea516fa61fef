"""Pages and rows: owned once, never lost, handed out in the order of arrival. None of it imports torch."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuformers.engine.pages import PageAllocator
from cuformers.engine.request import Finish, Request
from cuformers.engine.scheduler import Scheduler


@pytest.mark.parametrize("module", ["pages", "request", "scheduler"])
def test_it_imports_no_torch(module: str) -> None:
    code = f"import sys, cuformers.engine.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.integers(1, 30), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_every_page_is_free_or_owned_once(num_pages: int, moves: list[tuple[bool, int]]) -> None:
    pages, owned = PageAllocator(num_pages), []
    for take, amount in moves:
        if take:
            free = pages.num_free
            got = pages.take(amount)
            assert (got is None) == (amount > free), "pages are refused only where there are not so many"
            if got is not None:
                assert len(got) == amount
                owned.append(got)
        elif owned:
            pages.give_back(owned.pop(amount % len(owned)))
        held = [page for some in owned for page in some]
        assert len(set(held)) == len(held) and set(held) <= set(range(num_pages))
        assert pages.num_free + len(held) == num_pages
    for some in owned:
        pages.give_back(some)
    assert sorted(pages.take(num_pages) or []) == list(range(num_pages))


def test_more_pages_than_there_are_do_not_come_back() -> None:
    pages = PageAllocator(2)
    with pytest.raises(AssertionError, match="more pages"):
        pages.give_back([0])


PAGE, PAGES, SLOTS, BUDGET = 4, 12, 3, 20
SIZES = st.tuples(st.integers(1, 24), st.integers(1, 24))


def check(scheduler: Scheduler) -> None:
    running = scheduler.running
    pages = [page for r in running.values() for page in r.pages]
    assert len(set(pages)) == len(pages), "a page is owned twice"
    assert scheduler.pages.num_free + len(pages) == PAGES, "a page leaked"
    assert all(r.slot == slot for slot, r in running.items()) and set(running) <= set(range(SLOTS))
    for r in running.values():
        assert len(r.pages) * PAGE >= r.max_length, "a running request can always finish"
    for r in scheduler.waiting:
        assert not r.pages and r.slot == -1 and r.finish is None


def admit(scheduler: Scheduler) -> list[Request]:
    """Admits, and checks that nothing could have been admitted more, or out of order."""
    queue = list(scheduler.waiting)
    admitted = scheduler.admit()
    assert admitted == queue[: len(admitted)], "first come, first served"
    assert len(admitted) <= 1 or sum(len(r.context) for r in admitted) <= BUDGET
    if len(admitted) < len(queue):
        following = queue[len(admitted)]
        room = len(scheduler.running) < SLOTS and scheduler.pages_of(following) <= scheduler.pages.num_free
        spent = sum(len(r.context) for r in admitted)
        assert not room or (admitted and spent + len(following.context) > BUDGET), "it could have run"
    return admitted


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(SIZES, st.tuples(st.sampled_from(["admit", "take", "again"]), st.integers(0, 5))), max_size=60)
)
def test_any_order_of_events(events: list[tuple]) -> None:
    scheduler = Scheduler(num_slots=SLOTS, num_pages=PAGES, page_size=PAGE, max_prefill_tokens=BUDGET)
    added: list[Request] = []
    for kind, value in events:
        if isinstance(kind, int):
            request = Request(prompt=[1] * kind, max_new_tokens=value)
            if scheduler.pages_of(request) > PAGES:
                with pytest.raises(ValueError, match="shorten the prompt"):
                    scheduler.add(request)
            else:
                scheduler.add(request)
                added.append(request)
        elif kind == "admit":
            admit(scheduler)
        elif scheduler.running:
            request = list(scheduler.running.values())[value % len(scheduler.running)]
            if kind == "again":
                scheduler.again(request)
                assert scheduler.waiting[0] is request
            else:
                request.take(5)
                if request.finish is not None:
                    scheduler.release(request)
        check(scheduler)
    for _ in range(10_000):
        if not scheduler.busy:
            break
        assert admit(scheduler) or scheduler.running, "it waits for ever"
        check(scheduler)
        for request in list(scheduler.running.values()):
            request.take(5)
            if request.finish is not None:
                scheduler.release(request)
    assert all(r.finish is Finish.LENGTH and len(r.generated) == r.max_new_tokens for r in added)
    assert scheduler.pages.num_free == PAGES and not scheduler.busy, "when idle every page is free"


def test_a_prompt_longer_than_the_budget_goes_alone() -> None:
    scheduler = Scheduler(num_slots=3, num_pages=100, page_size=4, max_prefill_tokens=10)
    long, short = Request(prompt=[1] * 30, max_new_tokens=1), Request(prompt=[1], max_new_tokens=1)
    scheduler.add(long)
    scheduler.add(short)
    assert scheduler.admit() == [long]
    assert scheduler.admit() == [short]


@pytest.mark.parametrize("eos, stop, count, finish", [
    ((7,), False, 1, Finish.EOS),
    ((8,), True, 1, Finish.STOPPED),
    ((7,), True, 1, Finish.EOS),  # the token's own meaning comes first
    ((), False, 2, Finish.LENGTH),
])  # fmt: skip
def test_why_a_request_ends(eos: tuple[int, ...], stop: bool, count: int, finish: Finish) -> None:
    request = Request(prompt=[1], max_new_tokens=2, eos=eos, on_token=lambda r, token: stop)
    for _ in range(count):
        assert request.finish is None
        request.take(7)
    assert request.finish is finish and request.generated == [7] * count
    with pytest.raises(AssertionError, match="no more tokens"):
        request.take(7)
