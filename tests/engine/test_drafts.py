"""Guessed tokens change no answer: the same tokens with drafts as without, in fewer steps where the text repeats."""

from collections.abc import Callable

import pytest
import torch
from models.checkpoints import shared, tokens

from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.engine import engine as engine_module
from cuformers.engine.capacity import Capacity
from cuformers.engine.engine import Engine
from cuformers.engine.group import Group
from cuformers.engine.request import Drafts, Finish, Request, Sampling
from cuformers.engine.runner import Runner
from cuformers.generation.logits_processors import SuppressTokensLogitsProcessor

NEW = 40


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets engines have so many pages."""

    def limit(pages: int) -> None:
        capacity = Capacity(rows=4, length=512, pages=pages, eos=8)
        monkeypatch.setattr(engine_module, "needed", lambda *_: capacity)

    return limit


def made(name: str, lag: int) -> Engine:
    engine = Engine(shared(name))
    engine.lag = lag
    return engine


def requests(drafts: Drafts | None, **options) -> list[Request]:
    """Prompts that repeat themselves in part, one by one of another length."""
    prompts = [tokens(1, n, seed=n)[0].tolist() * times for n, times in ((5, 6), (70, 1), (3, 20), (33, 2), (1, 1))]
    return [Request(prompt=p, max_new_tokens=NEW + 7 * i, drafts=drafts, **options) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral", "phi3-longrope", "llama-dynamic"])
@pytest.mark.parametrize("drafts", [Drafts(count=1), Drafts(count=4), Drafts(count=7, longest=1)], ids=str)
def test_the_answers_are_the_same(name: str, drafts: Drafts, lag: int, tight: Callable) -> None:
    """Also where pages are few, so that requests are preempted."""
    ways = {"sampling": Sampling(temperature=0.8, top_k=20, seed=5)} if drafts.count == 4 else {}
    plain, eos = requests(None, **ways), ()
    made(name, 0).run(plain)
    if drafts.count == 7:
        eos = (plain[1].generated[9],)
    ends = [r.generated.index(eos[0]) + 1 if eos and eos[0] in r.generated else None for r in plain]
    expected = [r.generated[:end] for r, end in zip(plain, ends)]
    for pages in (200, 24):
        tight(pages)
        engine, guessed = made(name, lag), requests(drafts, eos=eos, **ways)
        engine.run(guessed)
        assert [r.generated for r in guessed] == expected
        assert engine.planner is not None
        stats = engine.planner.stats()
        assert stats.num_free + stats.num_cached == stats.num_blocks and not stats.num_running


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    """A model whose layers add nothing maps each token to a next one, and so soon goes in a circle."""
    model = AutoModelForCausalLM.from_config(shared("llama").config, dtype="float32", device_map="cpu", seed=0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.get_parameter("self_attn.o_proj.weight").zero_()
            layer.get_parameter("mlp.down_proj.weight").zero_()

    def steps(drafts: Drafts | None) -> int:
        engine, count = Engine(model), 0
        request = Request(prompt=[7], max_new_tokens=60, drafts=drafts)
        engine.reserve([request])
        engine.add(request)
        while engine.step():
            count += 1
        assert len(request.generated) == 60
        return count

    plain, guessed = steps(None), steps(Drafts(count=4))
    assert plain == 60 and guessed < 40


def test_some_guess_beside_others_that_can_not() -> None:
    """Processors and log-probabilities go on token by token; nobody's answer changes."""

    def mixed(drafts: Drafts | None) -> list[Request]:
        made_ = requests(drafts)
        made_[1].group = Group(processors=[SuppressTokensLogitsProcessor(range(3, 40))])
        made_[3].logprobs = 2
        made_[4].on_token = lambda request, token: len(request.generated) == 3
        return made_

    plain, guessed = mixed(None), mixed(Drafts(count=3))
    made("llama", 0).run(plain)
    made("llama", 2).run(guessed)
    assert [r.generated for r in guessed] == [r.generated for r in plain]
    assert len(guessed[3].token_logprobs) == len(guessed[3].generated) and guessed[4].finish is Finish.STOPPED


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(
    "name, small", [("llama", "qwen3"), ("gemma3_text-pattern", "llama"), ("phi3-longrope", "gemma2")]
)
def test_a_small_model_guesses_and_changes_no_answer(name: str, small: str, lag: int, tight: Callable) -> None:
    """Models with windows and without, with rotations of their own; drawn tokens too."""
    for ways in ({}, {"sampling": Sampling(temperature=0.8, top_k=20, seed=5)}):
        plain = requests(None, **ways)
        made(name, 0).run(plain)
        tight(24 if lag else 200)
        engine, guessed = Engine(shared(name), draft=shared(small)), requests(Drafts(count=3), **ways)
        engine.lag = lag
        engine.run(guessed)
        assert [r.generated for r in guessed] == [r.generated for r in plain]


def test_a_model_that_guesses_for_itself_is_right() -> None:
    """Also after a prompt in chunks, a page that was found in the cache, and steps without guesses."""
    engine, steps = Engine(shared("llama"), draft=shared("llama"), max_batch_tokens=48), []
    step = Runner.step
    prompt = tokens(1, 130, seed=1)[0].tolist()
    asked = [
        Request(prompt=prompt, max_new_tokens=40, drafts=Drafts(count=4)),
        Request(prompt=[*prompt[:70], 5], max_new_tokens=40, drafts=Drafts(count=4)),
    ]
    try:
        Runner.step = lambda self, chunks, *args: (steps.append(len(chunks)), step(self, chunks, *args))[1]  # type: ignore
        engine.run(asked)
    finally:
        Runner.step = step  # type: ignore[method-assign]
    alone = [Request(prompt=r.prompt, max_new_tokens=40) for r in asked]
    made("llama", 0).run(alone)
    assert [r.generated for r in asked] == [r.generated for r in alone]
    assert engine.planner is not None and engine.planner.stats().hit_tokens == 64
    assert steps.count(0) <= 40 // 5 + 2, "all guesses are right"


def test_models_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"assistant_model.*windows"):
        Engine(shared("mistral"), draft=shared("llama"))
