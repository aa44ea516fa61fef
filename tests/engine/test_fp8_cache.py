"""An fp8 cache: half the bytes, and the same tokens however steps are cut and whatever runs beside a request."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from models.checkpoints import load, shared, tokens

from cuformers.auto.model import PreTrainedModel
from cuformers.engine import cache_dtype
from cuformers.engine import engine as engine_module
from cuformers.engine.cache_dtype import why_not_fp8
from cuformers.engine.capacity import Capacity
from cuformers.engine.engine import Engine
from cuformers.engine.host_cache import HostCache
from cuformers.engine.plan import Swap
from cuformers.engine.request import Drafts, Request, Sampling
from cuformers.engine.runner import Runner
from cuformers.generation.batching_config import ContinuousBatchingConfig
from cuformers.kernels.cache_scales import FP8
from cuformers.nn.cache import PagedCache, layout
from cuformers.nn.kernel_module import set_kernels
from tests.engine.rowwise import row_by_row

LENGTHS = (50, 61, 70, 5, 33, 100)
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def requests(**options: object) -> list[Request]:
    options = {"sampling": Sampling(temperature=0.7, seed=3), "logprobs": 0, **options}
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in LENGTHS]
    return [Request(prompt=p, max_new_tokens=20 + 9 * i, **options) for i, p in enumerate(prompts)]  # type: ignore


def run(engine: Engine, **options: object) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities, to the bit.

    Before each step every page that nobody holds is NaN, its factors too, unless prompts may find what it has.
    """
    work, step = requests(**options), Runner.step

    def watched(self: Runner, *args: object) -> object:
        assert engine.planner is not None
        free = [page for page in range(self.cache.num_pages) if not engine.planner.blocks.pool.held(page)]
        for tensor in self.cache.tensors if not engine.prefix_cache else ():
            tensor[:, free] = torch.nan
        return step(self, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "step", watched)
        engine.run(work)
    return [(request.generated, request.token_logprobs) for request in work]


@cache
def model(name: str) -> PreTrainedModel:
    """Computes each token by itself, so that nothing but the cache can make one depend on others."""
    made = load(name)
    set_kernels(made, row_by_row())
    return made


def fp8(name: str = "llama", **options: object) -> Engine:
    return Engine(model(name), kv_cache_dtype="fp8_e4m3", **options)  # type: ignore[arg-type]


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def limit(pages: int) -> None:
        capacity = Capacity(rows=4, length=512, pages=pages, eos=8)
        monkeypatch.setattr(engine_module, "needed", lambda *_: capacity)

    return limit


@pytest.mark.parametrize("name, pages", [("llama", 5), ("gemma3_text-pattern", 14)])
def test_tokens_do_not_depend_on_how_they_are_computed(name: str, pages: int, tight: Callable) -> None:
    expected = run(fp8(name, prefix_cache=False))
    assert expected != run(Engine(model(name))), "fp8 is really used"
    assert run(fp8(name, max_batch_tokens=17)) == expected, "chunks of prompts"
    assert run(fp8(name, prefix_cache=False), drafts=Drafts(count=3)) == expected, "several tokens a step"
    tight(pages)
    for options in ({}, {"prefix_cache": False}, {"prefix_cache": False, "host_bytes": 1 << 30}):
        engine = fp8(name, **options)
        assert run(engine) == expected, f"pages run out, with {options}"
        assert engine.planner is not None and (engine.planner.stats().preemptions or name != "llama")


def test_a_prompt_that_is_found_in_the_cache_goes_on_with_the_same_tokens() -> None:
    engine, prompt = fp8(), tokens(1, 200, seed=1)[0].tolist()
    first, again = (Request(prompt=prompt, max_new_tokens=40) for _ in range(2))
    engine.run([first])
    engine.run([again], keep_cache=True)  # as beam search does
    assert engine.planner is not None and engine.planner.stats().hit_tokens >= 192
    assert first.generated == again.generated


def test_an_assistant_changes_no_token() -> None:
    expected = run(fp8())
    engine = fp8(draft=shared("qwen3"))
    assert run(engine, drafts=Drafts(count=3)) == expected
    assert engine.runner is not None and engine.runner.draft is not None
    assert engine.runner.draft.cache.pool[0].dtype == FP8 and engine.runner.draft.cache.factors


def test_rounding_moves_log_probabilities_a_little() -> None:
    """Of the same tokens; the weights of these models are large."""
    prompt, reports = tokens(1, 100, seed=1)[0].tolist(), []
    for name in ("auto", "fp8"):
        request = Request(prompt=prompt, max_new_tokens=1, prompt_logprobs=0)
        Engine(shared("qwen3"), kv_cache_dtype=name, max_batch_tokens=30).run([request])
        reports.append(torch.tensor(request.prompt_token_logprobs[1:]))
    moved = (reports[0] - reports[1]).abs()
    assert 1e-4 < moved.mean() < 0.2 and moved.max() < 1


@pytest.mark.parametrize("head_dim, dtype, share", [(128, torch.bfloat16, 132 / 256), (64, torch.float32, 68 / 256)])
def test_bytes(head_dim: int, dtype: torch.dtype, share: float) -> None:
    """A byte for each number, and four for each head of a token."""
    made, cpu = layout([None] * 3), torch.device("cpu")
    sizes = {"num_kv_heads": 2, "head_dim": head_dim, "page_size": 16}
    pages = [PagedCache.page_bytes(made.size, 2, head_dim, 16, kind) for kind in (FP8, dtype)]
    assert pages[0] == share * pages[1]
    cache = PagedCache(layout=made, devices=[cpu] * 3, num_pages=5, dtype=FP8, **sizes)
    assert cache.nbytes == 5 * pages[0]
    engines = Engine(shared("llama")), fp8()
    small, large = (engine._page_bytes(engine._layout()) for engine in engines[::-1])
    assert small < large / 2
    for engine in engines:
        run(engine)
        assert engine.runner is not None
        assert engine.runner.cache_bytes == engine.runner.capacity.pages * engine._page_bytes(engine._layout())


def test_copies_on_the_host_have_the_factors_too() -> None:
    made, cpu = layout([None]), torch.device("cpu")
    cache = PagedCache(
        layout=made, devices=[cpu], num_pages=3, num_kv_heads=2, head_dim=8, page_size=16, dtype=FP8
    )
    for tensor in cache.tensors:
        tensor.copy_(torch.rand(tensor.shape))
    kept = [tensor.float().clone() for tensor in cache.tensors]
    host = HostCache(cache, 2)
    host.save([Swap(1, 0)])
    for tensor in cache.tensors:
        tensor.fill_(torch.nan)
    host.restore([Swap(2, 0)])
    assert len(kept) == 2
    for tensor, before in zip(cache.tensors, kept):
        assert torch.equal(tensor[:, 2].float(), before[:, 1]) and tensor[:, :2].float().isnan().all()
    assert host.nbytes == cache.nbytes * 2 // 3


def test_generate_generate_batch_and_beams() -> None:
    llama, ids = model("llama"), tokens(3, 70, seed=5)
    plain = llama.generate(ids, max_new_tokens=20, **GREEDY)
    together = llama.generate(ids, max_new_tokens=20, kv_cache_dtype="fp8", **GREEDY)
    assert not torch.equal(plain, together)
    assert torch.equal(together, llama.generate(ids, max_new_tokens=20, kv_cache_dtype="fp8_e4m3", **GREEDY))
    kept, usual = llama.engine_with(None, "fp8"), llama.engine
    assert kept is llama.engine_with(None, "fp8_e4m3"), "its buffers are kept"
    assert kept.runner is not None and kept.runner.cache.pool[0].dtype == FP8
    assert usual.runner is not None and usual.runner.cache.pool[0].dtype == torch.float32
    config = ContinuousBatchingConfig(num_blocks=8, max_requests_per_batch=2, kv_cache_dtype="fp8")
    batch = llama.generate_batch(ids.tolist(), continuous_batching_config=config, max_new_tokens=20, **GREEDY)
    assert [output.generated_tokens for output in batch.values()] == together[:, 70:].tolist()
    options = {"max_new_tokens": 8, "num_beams": 3, **GREEDY}
    beams = [llama.generate(ids, kv_cache_dtype=name, **options) for name in ("auto", "fp8")]
    assert beams[0].shape == beams[1].shape and not torch.equal(*beams)
    llama.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("name", ["fp8_e5m2", "int8", None, torch.float8_e4m3fn])
def test_other_names_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype=.*'auto', 'fp8_e4m3', 'fp8'"):
        Engine(shared("llama"), kv_cache_dtype=name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kv_cache_dtype=.*'auto', 'fp8_e4m3', 'fp8'"):
        ContinuousBatchingConfig(kv_cache_dtype=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("have, possible", [(None, True), ((9, 0), True), ((8, 9), True), ((8, 6), False)])
def test_old_gpus_are_refused(
    have: tuple[int, int] | None, possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_dtype, "capability", lambda _: have)
    assert (why_not_fp8(shared("llama")) is None) == possible
    if not possible:
        with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8'.*'auto'.*capability 8\.6, fp8 needs 8\.9"):
            Engine(shared("llama"), kv_cache_dtype="fp8")


def test_a_deterministic_model_refuses_it() -> None:
    llama = load("llama")
    set_kernels(llama, replace(llama.ops, deterministic=True))
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8'.*'auto'.*deterministic"):
        llama.generate(tokens(1, 4), kv_cache_dtype="fp8")


def test_where_it_is_no_option_the_error_says_where_it_belongs() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype.*argument of generate.*ContinuousBatchingConfig"):
        shared("llama").generate_batch([[1, 2]], kv_cache_dtype="fp8", max_new_tokens=1)
    with pytest.raises(ValueError, match=r"cache_implementation='quantized'.*kv_cache_dtype"):
        shared("llama").generate(tokens(1, 4), cache_implementation="quantized")
