"""Every family in storms: requests come, leave and give way at random, and each gets transformers' greedy tokens.

Storms are drawn from fixed seeds. Pages are small and few, prompts begin alike and end with pages, chunks are of any
size, the host is late or not, and whatever page nobody holds is full of NaN at every step.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
from models.checkpoints import ALONE, oracle, shared, tokens
from models.families import FAMILIES

from cuformers.engine import engine as engine_module
from cuformers.engine.block_manager import BlockManager
from cuformers.engine.capacity import Capacity
from cuformers.engine.engine import Engine
from cuformers.engine.request import Drafts, Finish, Request
from cuformers.nn.cache import layout

NEW = 18
STEP_TOKENS = (1, 3, 16, 64, 4096)
LAGS = (0, 2)
CLEAR = 1e-4
"""The least distance of the two largest logits: several times what another order of sums changes."""

Prompt = tuple[int, ...]


@cache
def prompts() -> tuple[Prompt, ...]:
    """Shared beginnings; ends with pages of 4 and 8 tokens, and beside them; one that passes 64 positions."""
    base, other = (tuple(tokens(1, 56, seed=seed)[0].tolist()) for seed in (11, 12))
    short = (base[:1], base[:8], base[:16], base[:16] + other[:3], base[:8] + other[:9], other[:13])
    return (*short, base[:24], base[:52])


@cache
def expected(name: str) -> dict[Prompt, list[int]]:
    """NEW tokens after each prompt, by transformers, none of them a near tie."""
    calls = [[prompt] for prompt in prompts()] if name in ALONE else [prompts()]
    return {prompt: answer for call in calls for prompt, answer in zip(call, greedy(name, call))}


def greedy(name: str, batch: Sequence[Prompt]) -> list[list[int]]:
    model = copy.deepcopy(oracle(name)) if name in ALONE else oracle(name)  # rotations of earlier calls stay behind
    width = max(map(len, batch))
    ids, mask = (torch.tensor([[0] * (width - len(p)) + f(p) for p in batch]) for f in (list, lambda p: [1] * len(p)))
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
        use_cache=name != "phi3-longrope", return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    best = torch.cat(out.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > CLEAR, "a near tie: draw other prompts"
    return out.sequences[:, width:].tolist()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request, and what comes of it unless somebody cancels it."""

    request: Request
    tokens: list[int]
    finish: Finish


def draw_cases(name: str, step_tokens: int, rng: random.Random) -> list[Case]:
    """Enough requests for a few dozen steps."""
    among = prompts()[-2:] if rng.random() < 0.3 else prompts()[:-1]
    return [draw_case(name, rng.choice(among), rng) for _ in range(5 if step_tokens < 16 else 12)]


def draw_case(name: str, prompt: Prompt, rng: random.Random) -> Case:
    """A request that ends by its length, by a token, or because the host stops it: what comes first."""
    new = rng.choice((NEW, rng.randint(1, NEW)))
    whole, eos, stop = expected(name)[prompt], rng.randrange(NEW), rng.randint(1, NEW)
    request = Request(prompt=list(prompt), max_new_tokens=new, priority=rng.choice((0, 0, 0, 1)))
    ends = [(new, 1, Finish.LENGTH)]
    if rng.random() < 0.25:
        request.eos = (whole[eos],)
        ends.append((whole.index(whole[eos]) + 1, 0, Finish.EOS))
    if rng.random() < 0.25:
        request.on_token = lambda request, _: len(request.generated) == stop
        ends.append((stop, 2, Finish.STOPPED))
    count, _, finish = min(ends, key=lambda end: end[:2])
    return Case(request=request, tokens=whole[:count], finish=finish)


def draw_engine(
    name: str, requests: Sequence[Request], step_tokens: int, lag: int, rng: random.Random, patch: pytest.MonkeyPatch
) -> Engine:
    """One whose pages are barely enough for the largest request."""
    model, page = shared(name), rng.choice((4, 8))
    windows = layout([spec.window for spec in model.model.attention_specs]).windows
    blocks = BlockManager(num_blocks=1, block_size=page, windows=windows, prefix_cache=False)
    ahead = 1 + max(request.drafts.count if request.drafts else 0 for request in requests)
    need = max(blocks.most_pages(request.max_length, ahead) for request in requests)
    pages = need + len(windows) * rng.choice((0, 1, 4))
    patch.setattr(engine_module, "PAGE_SIZE", page)
    engine = Engine(model, max_batch_tokens=step_tokens)
    engine.lag = lag
    engine.configure(Capacity(rows=rng.randint(3, 6), length=80, pages=pages, eos=1))
    return engine


def storm(engine: Engine, requests: Sequence[Request], rng: random.Random) -> set[Request]:
    """Runs requests to their ends: those that were cancelled before."""
    coming, there, cancelled, busy = list(requests), [], set(), True
    while busy or coming:
        event = rng.random()
        if coming and event < 0.3:
            there.append(coming.pop())
            engine.add(there[-1])
            busy = True
        elif there and event < 0.32:
            request = rng.choice(there)
            cancelled |= {request} if request.finish is None else set()
            engine.cancel(request)
        else:
            poison(engine)
            busy = engine.step()
    return cancelled


def poison(engine: Engine) -> None:
    """Fills the pages that hold nothing of use with NaN."""
    assert engine.planner is not None and engine.runner is not None
    for layer in engine.runner.cache.pool:
        layer[:, engine.planner.blocks.pool._free] = float("nan")


def check(cases: Sequence[Case], cancelled: set[Request], where: str) -> None:
    for case in cases:
        request = case.request
        if request in cancelled:
            assert request.generated == case.tokens[: len(request.generated)], where
            assert request.finish is Finish.CANCELLED, where
        else:
            assert (request.generated, request.finish) == (case.tokens, case.finish), where


@pytest.mark.parametrize("name", FAMILIES)
def test_storms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preemptions = hits = 0
    for step_tokens, lag in product(STEP_TOKENS, LAGS):
        where = f"{name}, {step_tokens} tokens a step, {lag} steps late"
        rng = random.Random(where)
        cases = draw_cases(name, step_tokens, rng)
        requests = [case.request for case in cases]
        if rng.random() < 0.3:
            for request in requests:
                request.drafts = Drafts(count=3)
        engine = draw_engine(name, requests, step_tokens, lag, rng, monkeypatch)
        check(cases, storm(engine, requests, rng), where)
        assert engine.planner is not None
        stats = engine.planner.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free + stats.num_cached == stats.num_blocks, f"a page leaked: {where}"
        preemptions, hits = preemptions + stats.preemptions, hits + stats.hit_tokens
    kinds = {spec.window for spec in shared(name).model.attention_specs}
    assert preemptions > 1 or None not in kinds, "hardly anybody had to give way, as without windows many must"
    assert hits > 100 or name == "llama-dynamic", "hardly a beginning was found again"


@pytest.mark.parametrize("name", FAMILIES)
def test_computing_a_request_anew_changes_nothing(name: str) -> None:
    """As if it had to give way, and lost its pages, after every few tokens; up to 70 of 64 positions."""
    prompt, told = prompts()[-1], []
    for every in (NEW + 1, 5):
        request = Request(prompt=list(prompt), max_new_tokens=NEW, logprobs=0)
        engine = Engine(shared(name), prefix_cache=False)
        engine.configure(Capacity(rows=2, length=80, pages=20, eos=1))
        engine.add(request)
        while engine.step():
            if len(request.generated) % every == every - 1 and request.finish is None:
                assert engine.planner is not None
                engine.planner.again(request)
        assert request.generated == expected(name)[prompt]
        told.append(torch.tensor(request.token_logprobs))
    torch.testing.assert_close(*told, rtol=0, atol=CLEAR)


def test_a_long_prompt_does_not_go_on_from_short_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """LongRoPE has other factors for all of a prompt beyond 32 tokens, so that its beginning has other keys too."""
    monkeypatch.setattr(engine_module, "PAGE_SIZE", 8)
    engine, answers = Engine(shared("phi3-longrope")), expected("phi3-longrope")
    engine.configure(Capacity(rows=1, length=80, pages=40, eos=1))
    for prompt in (prompts()[-2], prompts()[-1], prompts()[-2]):
        request = Request(prompt=list(prompt), max_new_tokens=4)
        engine.add(request)
        while engine.step():
            pass
        assert request.generated == answers[prompt][:4]
