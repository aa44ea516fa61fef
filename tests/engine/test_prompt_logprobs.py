"""What a request is told about its prompt: a plain forward's values, however it is cut and whoever is beside it."""

import pytest
import torch
from models.checkpoints import shared, tokens

from cuformers.engine import engine as engine_module
from cuformers.engine import logprobs as logprobs_module
from cuformers.engine.capacity import Capacity
from cuformers.engine.engine import Engine
from cuformers.engine.group import Group
from cuformers.engine.logprobs import Stretch, report_prompts
from cuformers.engine.request import Request
from cuformers.generation.logits_processors import SuppressTokensLogitsProcessor
from cuformers.kernels.logprobs import Logprobs

LENGTHS = (70, 5, 1, 33, 130)
SWITCH = 33
"""Tokens from which phi3-longrope has other rotary factors."""


def make(name: str = "llama", lag: int = 0, **options) -> Engine:
    engine = Engine(shared(name), **options)
    engine.lag = lag
    return engine


def prompt(length: int) -> list[int]:
    return tokens(1, length, seed=length)[0].tolist()


def requests(top: int | None = 3, lengths: tuple[int, ...] = LENGTHS, **options) -> list[Request]:
    return [Request(prompt=prompt(n), max_new_tokens=4, prompt_logprobs=top, **options) for n in lengths]


def assert_told(request: Request, name: str = "llama", top: int = 3) -> None:
    """The request has heard what a forward over its prompt says."""
    with torch.no_grad():
        rows = shared(name)(torch.tensor([request.prompt])).logits[0, :-1].float().log_softmax(-1)
    assert len(request.prompt_token_logprobs) == len(request.prompt_top_logprobs) == len(request.prompt)
    assert request.prompt_token_logprobs[0] is None and request.prompt_top_logprobs[0] is None
    chosen = rows.gather(1, torch.tensor(request.prompt[1:], dtype=torch.int64)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(request.prompt_token_logprobs[1:]), chosen, rtol=1e-5, atol=1e-5)
    best = rows.topk(top)
    for said, ids, values in zip(request.prompt_top_logprobs[1:], best.indices.tolist(), best.values, strict=True):
        assert said is not None and [token for token, _ in said] == ids
        torch.testing.assert_close(torch.tensor([v for _, v in said]), values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("size", [16, 50, 4096])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_chunks_of_any_size_say_what_a_forward_says(name: str, size: int, lag: int) -> None:
    asked, free = requests(), requests(None)
    make(name, lag, max_batch_tokens=size).run(asked)
    make(name, lag, max_batch_tokens=size).run(free)
    for request, other in zip(asked, free):
        assert_told(request, name)
        assert request.generated == other.generated and not other.prompt_token_logprobs


def test_long_prompts_are_told_of_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "SLICE", 7)
    most = []
    model = shared("llama")
    whole = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: (most.append(len(hidden)), whole(hidden))[1])
    asked = requests()
    make().run(asked)
    assert max(most) == 7, "never the logits of more places"
    for request in asked:
        assert_told(request)


def test_each_request_hears_what_it_asked_for() -> None:
    group = Group(processors=[SuppressTokensLogitsProcessor(range(3, 60))])
    mixed = [
        *requests(0, (33,)), *requests(None, (50,)), *requests(12, (70,), group=group), *requests(2, (9,), logprobs=1)
    ]  # fmt: skip
    engine = make(max_batch_tokens=32)
    engine.run(mixed)
    assert_told(mixed[2], top=12)
    assert_told(mixed[3], top=2)
    assert mixed[0].prompt_top_logprobs == [None] + [[]] * 32 and None not in mixed[0].prompt_token_logprobs[1:]
    assert mixed[1].prompt_token_logprobs == [] and len(mixed[3].token_logprobs) == 4


def test_a_cached_prompt_is_told_of_whole() -> None:
    engine = make()
    engine.run(requests(None))
    asked = requests()
    engine.run(asked, keep_cache=True)
    assert engine.planner is not None and engine.planner.stats().hit_tokens == 0
    for request in asked:
        assert_told(request)
    engine.run(requests(None), keep_cache=True)
    assert engine.planner.stats().hit_tokens == 64 + 128, "others find the keys"


@pytest.mark.parametrize("lag", [0, 2])
def test_a_request_that_lost_its_pages_hears_of_each_token_once(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = Capacity(rows=4, length=256, pages=4, eos=8)
    monkeypatch.setattr(engine_module, "needed", lambda *_: capacity)
    asked = [Request(prompt=prompt(n), max_new_tokens=80, prompt_logprobs=3) for n in (60, 61, 62)]
    engine = make(lag=lag, max_batch_tokens=48)
    engine.run(asked)
    assert engine.planner is not None and engine.planner.stats().preemptions > 0
    for request in asked:
        assert_told(request)


def test_a_stretch_that_was_told_of_in_part() -> None:
    (request,) = requests(1, (6,))
    table = torch.arange(4.0)
    said = Logprobs(table, table.int(), table[:, None], table[:, None].long())
    report_prompts([Stretch(request, 1, 2)], said)
    report_prompts([Stretch(request, 1, 4)], said)
    assert request.prompt_token_logprobs == [None, 0, 1, 2, 3]
    assert request.prompt_top_logprobs == [None, [(0, 0)], [(1, 1)], [(2, 2)], [(3, 3)]]


def test_a_prompt_that_is_computed_again_with_other_factors_keeps_its_first_values() -> None:
    (request,) = requests(3, (SWITCH - 2,))
    make("phi3-longrope").run([request])
    assert request.breakpoint == SWITCH
    assert_told(request, "phi3-longrope")


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("wanted", [-1, 33])
def test_more_than_steps_report_is_refused(name: str, wanted: int) -> None:
    asks = {"logprobs": None, "prompt_logprobs": None, name: wanted}
    with pytest.raises(ValueError, match=f"{name}={wanted} .*0 to 32"):
        make().run([Request(prompt=[5, 6], max_new_tokens=2, **asks)])
