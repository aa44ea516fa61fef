"""The planner against a simulated device: over any sequence of events, every request gets what it would get alone."""

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuformers.engine.plan import StepPlan
from cuformers.engine.planner import Planner
from cuformers.engine.request import Request
from tests.engine.simulation import EOS, VOCAB, Device, Host


@pytest.mark.parametrize("module", ["blocks", "block_manager", "job", "plan", "planner", "prefix", "tables", "waiting"])
def test_it_imports_no_torch(module: str) -> None:
    code = f"import sys, cuformers.engine.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PREFIXES = [[hash((family, i)) % VOCAB for i in range(40)] for family in (1, 2)]


@st.composite
def requests(draw: st.DrawFn) -> tuple[Request, int | None]:
    """A request, whose prompt often begins as another's does, and after how many tokens the host stops it."""
    prefix = PREFIXES[draw(st.integers(0, 1))][: draw(st.integers(0, 24))]
    prompt = prefix + draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if prefix else 1, max_size=3))
    new = draw(st.integers(1, 14))
    switch = draw(st.none() | st.integers(1, 14))
    request = Request(
        prompt=prompt,
        max_new_tokens=new,
        eos=draw(st.sampled_from([(), (), (EOS,)])),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        cache_salt=draw(st.sampled_from(["", "", "a"])),
        adapter=draw(st.sampled_from(["", "", "a"])),
        cache_prompt=draw(st.sampled_from([True, True, False])),
        breakpoint=None if switch is None or switch >= new else len(prompt) + switch,
    )
    return request, draw(st.none() | st.integers(1, 10))


@dataclass(frozen=True)
class World:
    block_size: int
    windows: tuple[int | None, ...]
    num_rows: int
    max_batch_tokens: int
    prefix_cache: bool
    watermark: float
    lookahead: int
    lag: int
    slack: int
    """Pages beyond those that the largest request needs."""

    def host(self, work: Sequence[tuple[Request, int | None]]) -> Host:
        probe = self.planner(1)
        need = max(probe.blocks.most_pages(request.max_length, self.lookahead) for request, _ in work)
        device = Device(need + self.slack, self.block_size, self.windows, self.lookahead)
        return Host(self.planner(need + self.slack), device, self.lag, dict(work))

    def planner(self, num_blocks: int) -> Planner:
        return Planner(
            num_rows=self.num_rows,
            num_blocks=num_blocks,
            block_size=self.block_size,
            windows=self.windows,
            max_batch_tokens=self.max_batch_tokens,
            prefix_cache=self.prefix_cache,
            watermark=self.watermark,
            lookahead=self.lookahead,
        )


WORLDS = st.builds(
    World,
    block_size=st.sampled_from([1, 2, 4]),
    windows=st.sampled_from([(None,), (8,), (None, 8, 8), (None, 3), (1,), (5, 2)]),
    num_rows=st.integers(1, 5),
    max_batch_tokens=st.integers(1, 40),
    prefix_cache=st.sampled_from([True, True, True, False]),
    watermark=st.sampled_from([0.0, 0.01, 0.2]),
    lookahead=st.integers(0, 1),
    lag=st.integers(0, 2),
    slack=st.integers(0, 24),
)
EVENTS = st.lists(
    st.one_of(
        st.just(("add", 0)),
        st.just(("step", 0)),
        st.tuples(st.just("steps"), st.integers(2, 12)),
        st.just(("collect", 0)),
        st.tuples(st.just("cancel"), st.integers(0, 7)),
        st.tuples(st.just("follow"), st.integers(0, 7)),
        st.sampled_from([("epoch", 0), ("compact", 0)]),
    ),
    max_size=40,
)


def follow(host: Host, earlier: Request) -> None:
    """Adds a request that begins with all tokens of an earlier one, its last included, as the next turn of a talk."""
    request = Request(prompt=[*earlier.context, 0], max_new_tokens=2, cache_salt=earlier.cache_salt)
    if host.planner.blocks.most_pages(request.max_length, 1) <= len(host.device.pages):
        host.add(request)


@settings(max_examples=300, deadline=None)
@given(WORLDS, st.lists(requests(), min_size=1, max_size=8), EVENTS)
def test_everyone_gets_what_they_would_get_alone(
    world: World, work: list[tuple[Request, int | None]], events: list[tuple[str, int]]
) -> None:
    host, coming = world.host(work), [request for request, _ in work]
    for kind, value in events:
        match kind:
            case "add" if coming:
                host.add(coming.pop(0))
            case "step" | "steps":
                for _ in range(max(value, 1)):
                    host.step()
                    host.check()
            case "collect":
                host.collect()
            case "cancel" if host.added:
                host.cancel(host.added[value % len(host.added)])
            case "follow" if host.added:
                follow(host, host.added[value % len(host.added)])
            case "epoch":
                host.new_epoch()
            case "compact":
                host.compacts = not host.compacts
        host.check()
    for request in coming:
        host.add(request)
    host.drain()


def storm(rng: random.Random) -> Host:
    """Many alike requests in a pool that is barely larger than the largest one needs."""
    world = World(
        block_size=rng.choice([1, 2, 4]),
        windows=rng.choice([(None,), (8,), (None, 8, 8), (None, 3)]),
        num_rows=rng.randint(2, 8),
        max_batch_tokens=rng.choice([2, 7, 16, 100]),
        prefix_cache=rng.random() < 0.8,
        watermark=rng.choice([0.0, 0.01]),
        lookahead=rng.randint(0, 1),
        lag=rng.randint(0, 2),
        slack=rng.choice([0, 1, 4, 12]),
    )
    work = [(storm_request(rng), rng.choice([None, None, None, 3, 9])) for _ in range(16)]
    return world.host(work)


def storm_request(rng: random.Random) -> Request:
    prompt, new = rng.choice(PREFIXES)[: rng.randint(1, 12)], rng.randint(1, 40)
    return Request(
        prompt=prompt,
        max_new_tokens=new,
        eos=(EOS,) if rng.random() < 0.1 else (),
        priority=rng.choice([0, 0, 0, 1]),
        breakpoint=len(prompt) + rng.randint(1, new - 1) if new > 1 and rng.random() < 0.2 else None,
    )


def test_storms_of_preemption() -> None:
    preemptions = hits = 0
    for seed in range(150):
        rng = random.Random(seed)
        host = storm(rng)
        coming = list(host.stops)
        while coming or rng.random() < 0.9:
            event = rng.random()
            if coming and event < 0.3:
                host.add(coming.pop())
            elif host.added and event < 0.33:
                host.cancel(rng.choice(host.added))
            elif host.added and event < 0.4:
                follow(host, rng.choice(host.added))
            elif event < 0.41:
                host.new_epoch()
            elif event < 0.43:
                host.compacts = not host.compacts
            elif event < 0.47:
                host.collect()
            else:
                host.step()
            host.check()
        host.drain()
        stats = host.planner.stats()
        preemptions, hits = preemptions + stats.preemptions, hits + stats.hit_tokens
    assert preemptions > 300 and hits > 1000, "the storms have become too calm to show anything"


def planner(num_blocks: int = 100, **options: Any) -> Planner:
    defaults: dict[str, Any] = dict(num_rows=8, block_size=4, windows=(None,), max_batch_tokens=64, watermark=0.0)
    return Planner(num_blocks=num_blocks, **(defaults | options))


def ask(length: int, new: int = 8, *, token: int = 1, **options: Any) -> Request:
    return Request(prompt=[token] * length, max_new_tokens=new, **options)


def step(planner: Planner, *, settled: bool = True) -> StepPlan:
    plan = planner.plan(settled)
    assert plan is not None
    return plan


def counts(plan: StepPlan) -> list[int]:
    return [chunk.count for chunk in plan.chunks]


def take(planner: Planner, *requests: Request) -> None:
    """The host sees one more token of each."""
    for request in requests:
        request.generated.append(1)
        planner.seen(request)


def test_what_can_never_run_is_refused_at_once() -> None:
    full = planner(num_blocks=4)
    full.add(ask(8, 8))
    with pytest.raises(ValueError, match="17 tokens needs 5 pages of the cache, which has 4: shorten the prompt"):
        full.add(ask(9, 8))
    with pytest.raises(ValueError, match="prompt"):
        full.add(ask(0))
    with pytest.raises(ValueError, match="max_new_tokens"):
        full.add(ask(4, 0))
    assert len(full.requests()) == 1
    planner(num_blocks=4, windows=(8,)).add(ask(1000))  # a window holds few pages at a time


def test_samples_of_one_prompt_cost_one_prompt() -> None:
    shared, requests = planner(), [ask(11) for _ in range(3)]
    for request in requests:
        shared.add(request)
    plan = step(shared)
    assert plan.admitted == tuple(requests) and counts(plan) == [11, 3, 3]
    assert requests[0].tables[0][:2] == requests[2].tables[0][:2]
    assert shared.stats().hit_tokens == 16


def test_a_prompt_that_is_all_there_computes_its_last_token() -> None:
    shared, requests = planner(), [ask(8) for _ in range(2)]
    for request in requests:
        shared.add(request)
    chunks = step(shared).chunks
    assert [(c.start, c.count, c.final) for c in chunks] == [(0, 8, True), (4, 4, True)]


@pytest.mark.parametrize("options", [{"cache_prompt": False}, {"cache_salt": "a"}, {"adapter": "a"}])
def test_who_does_not_read_the_cache(options: dict) -> None:
    shared = planner()
    shared.add(ask(8))
    shared.add(ask(8, **options))
    assert counts(step(shared)) == [8, 8]


def test_decodes_go_first_then_chunks_then_new_requests() -> None:
    mixed = planner(max_batch_tokens=10, prefix_cache=False)
    first, second, third = ask(3), ask(20), ask(2)
    mixed.add(first)
    step(mixed)
    take(mixed, first)
    mixed.add(second)
    mixed.add(third)
    plan = step(mixed)
    assert plan.decodes == (first,) and plan.admitted == (second, third)
    assert counts(plan) == [8, 1], "a chunk ends with a block where the context goes on"
    plan = step(mixed)
    assert plan.decodes == (first,) and [c.request for c in plan.chunks] == [second, third]
    assert counts(plan) == [8, 1] and [c.final for c in plan.chunks] == [False, True]


def test_the_order_is_priority_then_arrival_and_again_goes_first() -> None:
    queue = planner(num_rows=1)
    late, early, urgent = ask(4, priority=1), ask(5), ask(6, priority=-1)
    for request in (late, early, urgent):
        queue.add(request)
    assert step(queue).admitted == (urgent,)
    queue.finish(urgent)
    assert step(queue).admitted == (early,)
    queue.add(ask(4, priority=-5))
    queue.again(early)
    assert step(queue).admitted == (early,)


def test_a_new_request_leaves_room_for_those_that_run() -> None:
    tight = planner(num_blocks=20, watermark=0.2, prefix_cache=False, max_batch_tokens=18)
    running, waiting = ask(24), ask(40)
    tight.add(running)
    tight.add(waiting)
    assert step(tight).admitted == (running,)
    # 7 pages are for the first prompt and its next token, 4 are to stay free, so 9 are there for one that needs 11.
    assert not step(tight).admitted and not step(tight).admitted
    tight.finish(running)
    assert step(tight).admitted == (waiting,)


def test_a_refused_request_is_admitted_once_others_leave() -> None:
    tight = planner(num_blocks=12, prefix_cache=False)
    short, long, waiting = ask(4), ask(28), ask(20)
    for request in (short, long, waiting):
        tight.add(request)
    assert step(tight).admitted == (short, long)
    tight.finish(long)
    assert step(tight).admitted == (waiting,)


def test_preemption_takes_the_last_and_waits_for_what_is_in_flight() -> None:
    tight = planner(num_blocks=6, lookahead=0)
    first, last = ask(8, 12), ask(7, 12, token=2)
    tight.add(first)
    tight.add(last)
    assert step(tight).admitted == (first, last)
    for _ in range(4):
        take(tight, first, last)
        step(tight)
    while not (plan := step(tight, settled=False)).wait:
        pass
    assert plan.decodes == () and last.row >= 0
    for request in (first, last):
        request.generated += [1] * (request.computed + 1 - request.total)
    row = last.row
    plan = step(tight)
    assert plan.preempted == (last,) and plan.idle == (row,) and plan.decodes == (first,)
    assert tight.stats().preemptions == 1 and last.row == -1 and last.tables == []
    tight.finish(first)
    plan = step(tight)
    assert plan.admitted == (last,) and plan.chunks[0].start >= 8, "its blocks were still there"


def test_a_last_prompt_without_room_keeps_what_it_has() -> None:
    tight = planner(num_blocks=7, max_batch_tokens=5, prefix_cache=False)
    first, last = ask(4, 20), ask(17, 2)
    tight.add(first)
    step(tight)
    tight.add(last)
    for _ in range(7):
        take(tight, first)
        plan = step(tight)
    assert plan.decodes == (first,) and not plan.chunks, "no page is left for the prompt"
    assert last.computed == 16 and not tight.stats().preemptions
    take(tight, first)
    assert step(tight).preempted == (last,), "now the first one needs another page"


def test_new_weights_leave_nothing_behind() -> None:
    changed, running = planner(), ask(8)
    changed.add(running)
    step(changed)
    take(changed, running)
    changed.new_epoch()
    for _ in range(5):
        step(changed)
        take(changed, running)
    changed.finish(running)
    assert changed.stats().num_cached == 0
    changed.add(ask(8))
    assert counts(step(changed)) == [8]


def test_compacting_moves_the_last_rows() -> None:
    few, requests = planner(), [ask(4, token=i) for i in range(5)]
    for request in requests:
        few.add(request)
    step(few)
    for request in requests[:3]:
        few.finish(request)
    assert not few.can_compact(1) and few.can_compact(2)
    assert sorted(few.compact(2)) == [(3, 0), (4, 1)]
    assert [r.row for r in requests[3:]] == [0, 1]
    few.add(ask(4, token=9))
    assert step(few).admitted[0].row == 2
