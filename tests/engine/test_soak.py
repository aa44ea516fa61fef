"""Ten thousand requests through one engine: none is lost, no page and no memory leaks, each answer is its own."""

import gc
import random
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from models.checkpoints import tokens
from models.families import COMMON

from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.auto.config import AutoConfig
from cuformers.auto.model import PreTrainedModel
from cuformers.engine import engine as engine_module
from cuformers.engine.capacity import Capacity
from cuformers.engine.engine import Engine
from cuformers.engine.request import Finish, Request

torch.set_num_threads(1)

ROUNDS, EACH = 10, 1000
NEW = 12
BLOCKS = EACH
"""Python's memory blocks that a later round may add: a leak of one object a request would add eight times as many."""
BYTES = 16 << 20
"""That the process may grow in the later rounds: its allocator's own affair."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = AutoConfig.for_model("llama", **{**COMMON, "num_hidden_layers": 1})
    return AutoModelForCausalLM.from_config(config, dtype="float32", device_map="cpu", seed=0)


@pytest.fixture
def engine(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Its host is late, as on a GPU, and its pages are too few for all of its rows."""
    monkeypatch.setattr(engine_module, "PAGE_SIZE", 4)
    made = Engine(model, max_batch_tokens=64)
    made.lag = 2
    made.configure(Capacity(rows=32, length=64, pages=40, eos=1))
    return made


def answers(engine: Engine) -> dict[tuple[int, ...], list[int]]:
    """Prompts, some of which begin alike, with what each is answered alone."""
    base = [tokens(1, 24, seed=seed)[0].tolist() for seed in range(8)]
    known = {}
    for prompt in (tuple(b[:n]) for b in base for n in (1, 5, 8, 16, 17, 24)):
        request = Request(prompt=list(prompt), max_new_tokens=NEW)
        engine.add(request)
        while engine.step():
            pass
        known[prompt] = request.generated
    return known


def arrivals(known: dict[tuple[int, ...], list[int]], rng: random.Random, ends: Counter[Finish]) -> Iterator[Request]:
    """EACH requests that end by length, by a token or by the host; `ends` counts how."""
    for _ in range(EACH):
        prompt = rng.choice(list(known))
        request = Request(prompt=list(prompt), max_new_tokens=rng.randint(1, NEW), priority=rng.choice((0, 0, 1)))
        if rng.random() < 0.3:
            request.eos = (rng.choice(known[prompt]),)
        if rng.random() < 0.1:
            request.on_token = lambda request, _: len(request.generated) == 2
        request.on_end = lambda request: ends.update([request.finish])
        yield request


def run(engine: Engine, requests: Sequence[Request], rng: random.Random) -> None:
    """Feeds requests in at random, and cancels some of those that came last."""
    coming, there, busy = list(requests), [], True
    while busy or coming:
        event = rng.random()
        if coming and event < 0.8:
            there.append(coming.pop())
            engine.add(there[-1])
        elif there and event < 0.82:
            engine.cancel(rng.choice(there[-60:]))
        else:
            busy = engine.step()


def check(request: Request, whole: list[int]) -> None:
    """It has ended, as it should and with nothing but its own tokens."""
    new = request.generated
    assert request.finish is not None and request.row == -1 and not request.tables
    assert new == whole[: len(new)]
    if request.finish is Finish.LENGTH:
        assert len(new) == request.max_new_tokens
    if request.finish is Finish.EOS:
        assert new.index(request.eos[0]) == len(new) - 1


def sizes() -> tuple[int, int]:
    """Memory blocks of Python's objects, and bytes of the process."""
    gc.collect()
    return sys.getallocatedblocks(), int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_ten_thousand_requests(engine: Engine) -> None:
    rng, ends, known, planner = random.Random(1), Counter(), answers(engine), engine.planner
    assert planner is not None
    held: list[tuple[int, int]] = []
    for _ in range(ROUNDS):
        requests = list(arrivals(known, rng, ends))
        run(engine, requests, rng)
        for request in requests:
            check(request, known[tuple(request.prompt)])
        stats = planner.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free + stats.num_cached == stats.num_blocks, "a page leaked"
        del requests, request
        held.append(sizes())
    assert sum(ends.values()) == ROUNDS * EACH, "each ends once"
    assert min(ends[f] for f in (Finish.EOS, Finish.LENGTH, Finish.STOPPED, Finish.CANCELLED)) > 100
    assert stats.preemptions > 20 and stats.hit_tokens > 10_000, "the soak has become too calm"
    more, grown = (last - early for last, early in zip(held[-1], held[1]))
    assert more < BLOCKS and grown < BYTES
