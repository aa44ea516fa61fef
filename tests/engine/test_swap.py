"""Requests that give way leave their keys on the host and go on from there: the same tokens, and less is computed."""

from collections.abc import Callable

import pytest
import torch
from models.checkpoints import shared, tokens

from cuformers.engine import engine as engine_module
from cuformers.engine.capacity import Capacity
from cuformers.engine.engine import Engine
from cuformers.engine.host_cache import HostCache
from cuformers.engine.plan import Swap
from cuformers.engine.request import Drafts, Request, Sampling
from cuformers.engine.runner import Runner
from cuformers.engine.saved import HostPlaces
from cuformers.nn.cache import PagedCache, layout


def requests(**options: object) -> list[Request]:
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (50, 61, 70, 5, 33, 100)]
    return [Request(prompt=p, max_new_tokens=150 + 9 * i, **options) for i, p in enumerate(prompts)]  # type: ignore


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def limit(pages: int) -> None:
        capacity = Capacity(rows=4, length=512, pages=pages, eos=8)
        monkeypatch.setattr(engine_module, "needed", lambda *_: capacity)

    return limit


def computed(engine: Engine, work: list[Request]) -> int:
    """Tokens of chunks that the work takes; every page that nobody holds is full of NaN before each step."""
    counts, step = [], Runner.step

    def watched(self: Runner, chunks: list, *args: object) -> object:
        assert engine.planner is not None
        free = [page for page in range(self.cache.num_pages) if not engine.planner.blocks.pool.held(page)]
        for tensor in self.cache.pool:
            tensor[:, free] = torch.nan
        counts.append(sum(chunk.count for chunk in chunks))
        return step(self, chunks, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "step", watched)
        engine.run(work)
    return sum(counts)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("name, pages", [("llama", 9), ("gemma3_text-pattern", 24), ("phi3-longrope", 9)])
@pytest.mark.parametrize("drafts", [None, Drafts(count=3)], ids=str)
def test_the_tokens_are_the_same(name: str, pages: int, drafts: Drafts | None, lag: int, tight: Callable) -> None:
    way = Sampling(temperature=0.7, seed=3)
    plain = requests(sampling=way)
    Engine(shared(name)).run(plain)
    tight(pages)
    work, engine = [], Engine(shared(name))
    for space in (0, 1 << 30):
        engine = Engine(shared(name), prefix_cache=False, host_bytes=space)
        engine.lag, again = lag, requests(sampling=way, drafts=drafts)
        work.append(computed(engine, again))
        assert [r.generated for r in again] == [r.generated for r in plain]
        assert engine.planner is not None
        stats = engine.planner.stats()
        assert stats.num_free == stats.num_blocks and engine.planner.host.num_free == space // engine._page_bytes(
            engine._layout()
        )
    if engine.planner is not None and engine.planner.stats().preemptions and name == "llama":
        assert work[1] < work[0], "what is on the host is not computed again"
    assert name != "llama" or (engine.planner is not None and engine.planner.stats().preemptions > 0)


def test_places_are_handed_out_once_and_come_back() -> None:
    host = HostPlaces(3)
    saved, swaps = host.save(20, [[4, None], [7, 1]])
    assert saved is not None and sorted(s.place for s in swaps) == [0, 1, 2] and [s.page for s in swaps] == [4, 7, 1]
    assert host.save(5, [[2, None]]) == (None, []) and host.num_free == 0
    host.drop(saved)
    assert host.num_free == 3 and host.save(0, []) == (None, [])


def test_copies_are_those_of_the_pages() -> None:
    made, cpu = layout([None] * 2), torch.device("cpu")
    cache = PagedCache(
        layout=made, devices=[cpu] * 2, num_pages=4, num_kv_heads=2, head_dim=8, page_size=16, dtype=torch.float32
    )
    for tensor in cache.pool:
        tensor.normal_()
    kept = [tensor.clone() for tensor in cache.pool]
    host = HostCache(cache, 3)
    host.save([Swap(1, 2), Swap(3, 0)])
    for tensor in cache.pool:
        tensor.fill_(torch.nan)
    host.restore([Swap(0, 2), Swap(2, 0)])
    for tensor, before in zip(cache.pool, kept):
        assert torch.equal(tensor[:, 0], before[:, 1]) and torch.equal(tensor[:, 2], before[:, 3])
    assert host.nbytes == sum(tensor.nbytes for tensor in cache.pool) * 3 // 4
