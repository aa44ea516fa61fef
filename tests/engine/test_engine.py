"""The engine gives each request the tokens it would get alone: in waves, with a late host, after errors and stops."""

from collections.abc import Callable
from threading import Thread

import pytest
import torch
from models.checkpoints import oracle, shared, tokens
from torch import Tensor

from cuformers.base.errors import OutOfDeviceMemory
from cuformers.engine import engine as engine_module
from cuformers.engine.capacity import Capacity, needed
from cuformers.engine.engine import Engine
from cuformers.engine.group import Group
from cuformers.engine.request import Finish, Request, Sampling
from cuformers.generation.logits_processors import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor
from cuformers.nn.cache import layout

LENGTHS = (5, 70, 1, 33, 12, 64, 3)
NEW = 24


def make(name: str = "llama", lag: bool = False) -> Engine:
    """An engine of its own; with `lag` the host is two steps late, as on a GPU."""
    engine = Engine(shared(name))
    engine.lag = 2 if lag else 0
    return engine


def prompts(*lengths: int) -> list[list[int]]:
    return [tokens(1, n, seed=n)[0].tolist() for n in lengths or LENGTHS]


def run(engine: Engine, many: list[list[int]], count: int = NEW, **options) -> list[Request]:
    requests = [Request(prompt=p, max_new_tokens=count, **options) for p in many]
    engine.run(requests)
    return requests


def alone(name: str, many: list[list[int]], count: int = NEW) -> list[list[int]]:
    cached = name != "phi3-longrope"
    return [
        oracle(name).generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), max_new_tokens=count,
                              do_sample=False, eos_token_id=None, use_cache=cached)[0, len(p) :].tolist()
        for p in many
    ]  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Lets engines have so many rows and pages, whatever the machine has."""

    def limit(rows: int, pages: int) -> None:
        capacity = Capacity(rows=rows, length=256, pages=pages, eos=8)
        monkeypatch.setattr(engine_module, "needed", lambda *_: capacity)

    return limit


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("rows, pages", [(2, 4), (3, 3), (8, 5)])
@pytest.mark.parametrize("name", ["llama", "phi3-longrope"])
def test_waves(name: str, rows: int, pages: int, lag: bool, tiny: Callable) -> None:
    tiny(rows, pages)
    requests = run(make(name, lag), prompts())
    assert [r.generated for r in requests] == expected(name)
    assert all(r.finish is Finish.LENGTH and not r.tables and r.row == -1 for r in requests)


_EXPECTED: dict[str, list[list[int]]] = {}


def expected(name: str) -> list[list[int]]:
    if name not in _EXPECTED:
        _EXPECTED[name] = alone(name, prompts())
    return _EXPECTED[name]


@pytest.mark.parametrize("lag", [False, True])
def test_a_pool_full_of_nan_changes_nothing(lag: bool, tiny: Callable) -> None:
    tiny(3, 6)
    engine = make("gemma3_text", lag)
    run(engine, prompts(4))
    assert engine.runner is not None
    for layer in engine.runner.cache.pool:
        layer.fill_(float("nan"))
    assert [r.generated for r in run(engine, prompts())] == expected("gemma3_text")


@pytest.mark.parametrize("lag", [False, True])
def test_stopped_requests_hand_their_rows_on(lag: bool, tiny: Callable) -> None:
    """Every other request is stopped from outside; whoever takes its row and pages is not disturbed."""
    tiny(2, 4)
    many = prompts()
    requests = [
        Request(prompt=p, max_new_tokens=NEW, on_token=(lambda r, t: len(r.generated) == 3) if i % 2 else None)
        for i, p in enumerate(many)
    ]
    make(lag=lag).run(requests)
    for i, (request, whole) in enumerate(zip(requests, expected("llama"))):
        assert request.generated == (whole[:3] if i % 2 else whole)
        assert request.finish is (Finish.STOPPED if i % 2 else Finish.LENGTH)


@pytest.mark.parametrize("lag", [False, True])
def test_a_stopped_row_writes_no_more(lag: bool, tiny: Callable) -> None:
    """Two rows stop at once and one request gets the pages of both: the row that stays empty must be idle."""
    tiny(3, 3)
    many = prompts(5, 12, 33, 64)
    requests = [
        Request(prompt=p, max_new_tokens=NEW, on_token=(lambda r, t: len(r.generated) == 3) if i < 2 else None)
        for i, p in enumerate(many)
    ]
    make(lag=lag).run(requests)
    for i, whole in enumerate(alone("llama", many)):
        assert requests[i].generated == (whole[:3] if i < 2 else whole)


@pytest.mark.parametrize("lag", [False, True])
def test_eos_of_each_request(lag: bool, tiny: Callable) -> None:
    tiny(2, 4)
    many = prompts()
    requests = [Request(prompt=p, max_new_tokens=NEW, eos=(e[i], 127)) for i, (p, e) in
                enumerate(zip(many, expected("llama")))]  # fmt: skip
    make(lag=lag).run(requests)
    for i, (request, whole) in enumerate(zip(requests, expected("llama"))):
        end = min(whole.index(t) for t in (whole[i], 127) if t in whole)
        assert request.generated == whole[: end + 1] and request.finish is Finish.EOS


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_of_the_users_code_leaves_the_engine_usable(error: type, lag: bool, tiny: Callable) -> None:
    tiny(2, 4)
    engine = make(lag=lag)

    def fails(request: Request, token: int) -> bool:
        if len(request.generated) == 4:
            raise error("of the user")
        return False

    with pytest.raises(error, match="of the user"):
        run(engine, prompts(), on_token=fails)
    assert engine.runner is not None and not engine.runner.table.decode.lengths.any()
    assert [r.generated for r in run(engine, prompts())] == expected("llama")


def test_a_processor_that_fails_leaves_the_engine_usable() -> None:
    engine = make()

    class Fails(SuppressTokensLogitsProcessor):
        def process(self, rows: object, scores: Tensor) -> Tensor:
            raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        engine.run([Request(prompt=[5, 6], max_new_tokens=4, group=Group(processors=[Fails([1])]))])
    assert [r.generated for r in run(engine, prompts())] == expected("llama")


@pytest.mark.parametrize("lag", [False, True])
def test_calls_with_different_processors_share_a_batch(lag: bool, tiny: Callable) -> None:
    """Four groups over rows that come and go: each request is as with its own processors alone."""
    tiny(4, 7)
    makes: list[Callable[[], Group]] = [
        Group,
        lambda: Group(processors=[RepetitionPenaltyLogitsProcessor(1.5)]),
        lambda: Group(processors=[SuppressTokensLogitsProcessor(list(range(3, 60)))], keep_scores=True),
        lambda: Group(keep_logits=True),
    ]
    many = prompts()

    def requests(groups: list[Group]) -> list[Request]:
        return [Request(prompt=p, max_new_tokens=6 + 3 * i, group=groups[i % 4]) for i, p in enumerate(many)]

    groups = [m() for m in makes]
    together = requests(groups)
    make(lag=lag).run(together)
    for i, request in enumerate(together):
        group = makes[i % 4]()
        one = requests([group] * 4)[i]
        make().run([one])
        assert request.generated == one.generated
        kept = groups[i % 4].traces.get(request)
        if kept is not None:
            mine, own = ([*t.logits, *t.scores] for t in (kept, group.traces[one]))
            for a, b in zip(mine[: len(one.generated)], own):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("lag", [False, True])
def test_greedy_and_drawn_requests_share_a_batch(lag: bool, tiny: Callable) -> None:
    tiny(3, 6)
    ways = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, top_k=9, top_p=0.9, seed=4)]
    requests = [Request(prompt=p, max_new_tokens=NEW, sampling=ways[i % 3]) for i, p in enumerate(prompts())]
    make(lag=lag).run(requests)
    for i, request in enumerate(requests):
        (single,) = run(make(), [request.prompt], sampling=ways[i % 3])
        assert request.generated == single.generated
        assert i % 3 or request.generated == expected("llama")[i]


def test_buffers_stay_where_the_work_fits_and_grow_where_it_does_not() -> None:
    engine = make()
    run(engine, prompts(3, 4), 4)
    first = engine.runner
    assert first is not None
    for lengths, count in [((9,), 100), ((1, 2), 3), ((70,), 5)]:
        run(engine, prompts(*lengths), count)
        assert engine.runner is first, "nothing is made anew for lengths and batches that fit"
    assert [r.generated for r in run(engine, prompts())] == expected("llama")
    assert engine.runner is first
    run(engine, [[5]] * 40, 1)
    grown = engine.runner
    assert grown is not None and grown is not first and grown.capacity.rows == 64
    run(engine, prompts(3), 4)
    assert engine.runner is grown, "it does not shrink"


def test_a_request_that_can_never_run_is_refused_before_anything_runs(tiny: Callable) -> None:
    tiny(2, 2)
    small = Request(prompt=[5], max_new_tokens=4)
    engine = make()
    with pytest.raises(ValueError, match="needs 3 pages"):
        engine.run([small, Request(prompt=[5] * 100, max_new_tokens=90)])
    assert not small.generated
    assert len(run(engine, [[5]], 4)[0].generated) == 4


def test_memory_that_does_not_hold_the_longest_request() -> None:
    request = Request(prompt=[5] * 100, max_new_tokens=156)
    with pytest.raises(OutOfDeviceMemory, match=r"256 tokens needs.*available: shorten"):
        needed([request], layout([None]), page_bytes=1000, free=4000)
    some = needed([request] * 40, layout([None]), page_bytes=1000, free=20_000)
    assert some.pages == 18 and some.rows == 64, "as many pages as the memory's share allows; the rest waits"
    assert needed([request] * 1000, layout([None]), page_bytes=1, free=10**9).rows == 256


def test_threads_take_turns() -> None:
    engine = make()
    run(engine, prompts())
    results: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        results[number] = [r.generated for r in run(engine, prompts())]

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [expected("llama")] * 4


def test_a_run_within_a_run_is_refused() -> None:
    engine = make()

    def again(request: Request, token: int) -> bool:
        run(engine, prompts(3))
        return False

    with pytest.raises(RuntimeError, match="within a generate"):
        run(engine, prompts(), on_token=again)
    assert [r.generated for r in run(engine, prompts())] == expected("llama")
