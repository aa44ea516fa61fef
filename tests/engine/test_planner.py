"""The planner against a simulated device: over any sequence of events, every request gets what it would get alone."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        st.sampled_from([("epoch", 0), ("compact", 0)]),
    ),
    max_size=40,
)


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
            case "epoch":
                host.new_epoch()
            case "compact":
                host.compacts = not host.compacts
        host.check()
    for request in coming:
        host.add(request)
    host.drain()
