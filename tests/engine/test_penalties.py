"""Penalties in the step itself: the tokens that logits processors give, whoever else is in the batch."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from models.checkpoints import shared, tokens
from torch import Tensor

from cuformers.auto.batching.groups import Groups
from cuformers.auto.requests import engine_request
from cuformers.engine import engine as engine_module
from cuformers.engine.capacity import MIN_BIAS, Capacity, needed
from cuformers.engine.engine import Engine
from cuformers.engine.group import Group
from cuformers.engine.penalizer import Penalizer
from cuformers.engine.request import Drafts, Request, TokenPenalties
from cuformers.engine.runner import Mode, Runner
from cuformers.generation.build import build_processors
from cuformers.generation.logits_processors import SuppressTokensLogitsProcessor
from cuformers.generation.resolved import ResolvedGeneration
from cuformers.generation.resolving import resolve
from cuformers.nn.cache import layout
from tests.engine.test_families_in_engine import storm

VOCAB = 128
NEW = 18
PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (1, 5, 8, 13, 16, 24, 40)]


def resolved(prompt: Sequence[int], options: dict[str, Any]) -> ResolvedGeneration:
    return resolve(None, None, {"max_new_tokens": NEW, **options}, len(prompt))


def asked(prompt: list[int], options: dict[str, Any]) -> Request:
    """The request as `generate_batch` makes it: with penalties where the device can do it all, else with a group."""
    own = resolved(prompt, options)
    return engine_request(prompt, own, 5, VOCAB, group=Groups(VOCAB).of(own))


def processed(prompt: list[int], options: dict[str, Any]) -> Request:
    """The same with all processors in a group; what only filters draws is the sampler's in both."""
    own = resolved(prompt, options)
    group = Group(processors=build_processors(replace(own, do_sample=False)))
    return engine_request(prompt, own, 5, VOCAB, group=group)


def draw_options(rng: random.Random) -> dict[str, Any]:
    """Any mix of what the op does; sometimes nothing, sometimes with something that it can't do."""
    some = {
        "repetition_penalty": rng.choice((1.3, 2.0, 0.8)),
        "frequency_penalty": rng.choice((0.6, -0.4)),
        "presence_penalty": rng.choice((0.9, -0.2)),
        "min_new_tokens": rng.randint(2, NEW),
        "bad_words_ids": [[rng.randrange(VOCAB)] for _ in range(20)],
        "sequence_bias": {(rng.randrange(VOCAB),): rng.uniform(-5, 5) for _ in range(20)},
        "suppress_tokens": rng.sample(range(VOCAB), 30),
    }
    options: dict[str, Any] = {"eos_token_id": rng.sample(range(VOCAB), rng.choice((1, 8)))}
    if rng.random() < 0.8:
        options |= {name: value for name, value in some.items() if rng.random() < 0.4}
    if rng.random() < 0.3:
        options |= {"do_sample": True, "temperature": rng.choice((0.5, 1.5)), "top_k": 30, "top_p": 0.9}
    if rng.random() < 0.15:
        options["no_repeat_ngram_size"] = 2
    return options


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Counts rows that were moved with their penalties, and steps with penalties alone, and beside processors."""
    seen = {"moved": 0, "alone": 0, "beside": 0}
    move, scores, process = Penalizer.move, Runner.scores, Group.process

    def moves(self: Penalizer, source: Tensor, target: Tensor) -> None:
        seen["moved"] += len(source)
        move(self, source, target)

    def scored(self: Runner, output: Any, mode: Mode) -> Tensor:
        seen["alone"] += mode.penalties
        return scores(self, output, mode)

    def processes(self: Group, *args: Any) -> Tensor:
        seen["beside"] += 1
        return process(self, *args)

    monkeypatch.setattr(Penalizer, "move", moves)
    monkeypatch.setattr(Runner, "scores", scored)
    monkeypatch.setattr(Group, "process", processes)
    yield seen


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_of_options_gives_the_tokens_of_the_processors(seed: int) -> None:
    rng = random.Random(seed)
    prompt, options = rng.choice(PROMPTS), draw_options(rng)
    options.pop("no_repeat_ngram_size", None)
    engine, one, other = Engine(shared("llama")), asked(prompt, options), processed(prompt, options)
    assert one.group is None
    for request in (one, other):
        engine.run([request])
    assert one.generated == other.generated and one.finish is other.finish


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("step_tokens", [5, 64])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_storms_of_penalties(
    name: str, step_tokens: int, lag: int, monkeypatch: pytest.MonkeyPatch, watched: dict[str, int]
) -> None:
    """Requests come, are preempted and move; each has the tokens that it has alone, by processors."""
    rng, preemptions = random.Random(step_tokens + lag), 0
    monkeypatch.setattr(engine_module, "PAGE_SIZE", 4)
    plain, groups = Engine(shared(name)), len(layout([s.window for s in shared(name).model.attention_specs]).windows)
    for _ in range(3):
        work = [(rng.choice(PROMPTS), draw_options(rng)) for _ in range(14)]
        engine = Engine(shared(name), max_batch_tokens=step_tokens)
        engine.lag = lag
        engine.configure(Capacity(rows=8, length=64, pages=groups * 17, eos=8, bias=64))
        requests = [asked(*one) for one in work]
        cancelled = storm(engine, requests, rng)
        for one, request in zip(work, requests):
            if request not in cancelled:
                plain.run([expected := processed(*one)])
                assert request.generated == expected.generated, one
        assert engine.planner is not None
        preemptions += engine.planner.stats().preemptions
    assert all(watched.values()), "the storms have become too calm"
    if name == "llama":  # windows give pages back, so that gemma3 seldom lacks any
        assert preemptions


def test_a_row_that_is_handed_on_keeps_no_penalties() -> None:
    """One row, so that each request takes the row of the one before."""
    engine = Engine(shared("llama"))
    engine.configure(Capacity(rows=1, length=64, pages=4, eos=1))
    banned = TokenPenalties(repetition=1.5, frequency=1.0, bias=tuple((t, -torch.inf) for t in range(10)))
    ways = [None, banned, None, TokenPenalties(bias=((7, 50.0),)), None]
    answers = []
    for way in ways:
        request = Request(prompt=[5, 6, 7], max_new_tokens=9, penalties=way)
        engine.add(request)
        while engine.step():
            pass
        answers.append(request.generated)
    assert answers[0] == answers[2] == answers[4] and answers[0] != answers[1] and answers[3] == [7] * 9


def test_steps_of_requests_without_penalties_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Mode] = []
    step = Runner.step
    monkeypatch.setattr(Runner, "step", lambda self, chunks, rows, mode, *more: (
        modes.append(mode), step(self, chunks, rows, mode, *more))[1])  # fmt: skip
    engine = Engine(shared("llama"))
    short = Request(prompt=[5, 6], max_new_tokens=4, penalties=TokenPenalties(presence=0.5))
    engine.run([short, Request(prompt=[5, 7], max_new_tokens=9)])
    assert [mode.penalties for mode in modes] == [True] * 4 + [False] * 5
    assert all(mode == Mode(sample=True, greedy=True) for mode in modes[4:])


def test_log_probabilities_are_of_the_models_logits() -> None:
    engine, banned = Engine(shared("llama")), TokenPenalties(repetition=1.7, bias=((9, -torch.inf), (11, 4.0)))
    request = Request(prompt=[5, 6, 7], max_new_tokens=9, penalties=banned, logprobs=3)
    engine.run([request])
    with torch.no_grad():
        logits = shared("llama")(torch.tensor([request.context])).logits[0, 2:-1]
    rows = logits.log_softmax(-1)
    expected = rows.gather(1, torch.tensor(request.generated)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(request.token_logprobs), expected, rtol=1e-5, atol=1e-5)
    assert [[t for t, _ in best] for best in request.top_logprobs] == rows.topk(3).indices.tolist()


@pytest.mark.parametrize("lag", [0, 2])
def test_nothing_is_guessed_beside_penalties(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers stay, and requests that outlive the penalized one guess again."""
    guessing: list[bool] = []
    step = Runner.step
    monkeypatch.setattr(Runner, "step", lambda self, chunks, rows, mode, *more: (
        guessing.append(mode.drafts is not None), step(self, chunks, rows, mode, *more))[1])  # fmt: skip

    def run(drafts: Drafts | None, late: int) -> list[list[int]]:
        engine = Engine(shared("llama"))
        engine.lag = late
        made = [
            Request(prompt=PROMPTS[1] * 4, max_new_tokens=12, penalties=TokenPenalties(repetition=1.5), drafts=drafts),
            Request(prompt=PROMPTS[2] * 4, max_new_tokens=50, drafts=drafts),
        ]
        engine.run(made)
        return [r.generated for r in made]

    plain = run(None, 0)
    assert not any(guessing)
    guessing.clear()
    assert run(Drafts(count=4), lag) == plain
    assert not any(guessing[:11]) and any(guessing[11:])


def test_the_table_grows_with_the_biases() -> None:
    def room(*counts: int) -> int:
        own = [TokenPenalties(bias=tuple((t, 1.0) for t in range(count))) for count in counts]
        requests = [Request(prompt=[5], max_new_tokens=2, penalties=p) for p in (None, *own)]
        return needed(requests, layout([None]), page_bytes=1, free=10**9).bias

    assert room() == room(1, MIN_BIAS) == MIN_BIAS and room(3, 40) == 64
    engine = Engine(shared("llama"))

    def run(count: int) -> object:
        bias = tuple((t, -torch.inf) for t in range(count))
        engine.run([request := Request(prompt=[5], max_new_tokens=6, penalties=TokenPenalties(bias=bias))])
        assert min(request.generated) >= count
        return engine.runner

    first = run(MIN_BIAS)
    assert run(1) is first and run(100) is not first and run(MIN_BIAS) is engine.runner


def test_a_request_has_penalties_or_processors() -> None:
    engine = Engine(shared("llama"))
    group = Group(processors=[SuppressTokensLogitsProcessor([1])])
    with pytest.raises(AssertionError, match="penalties too"):
        engine.run([Request(prompt=[5], max_new_tokens=2, penalties=TokenPenalties(), group=group)])
    engine.run([Request(prompt=[5], max_new_tokens=2, penalties=TokenPenalties(presence=1.0), group=Group())])
