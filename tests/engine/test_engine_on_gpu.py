"""What makes the engine fast on a GPU, held by tests: no host synchronisation, and a bounded number of graphs."""

import pytest
import torch

from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.auto.config import AutoConfig
from cuformers.auto.model import PreTrainedModel
from cuformers.cuda.streams import no_hidden_sync
from cuformers.engine import engine as engine_module
from cuformers.engine.capacity import Capacity
from cuformers.engine.engine import Engine
from cuformers.engine.request import Drafts, Request, Sampling
from tests.models.families import COMMON

pytestmark = pytest.mark.gpu
OPTIONS = dict(do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = AutoConfig.for_model("qwen3", **{**COMMON, "head_dim": 64})
    return AutoModelForCausalLM.from_config(config, dtype="bfloat16", device_map="cuda", seed=0)


def requests(count: int, sampled: bool) -> list[Request]:
    way = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=7) if sampled else Sampling()
    return [Request(prompt=[3 + i, 4, 5, 6], max_new_tokens=40, sampling=way) for i in range(count)]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_host_never_waits_but_for_tokens(model: PreTrainedModel, sampled: bool) -> None:
    for _ in range(3):  # compile, then capture prefill and decode
        model.engine.run(requests(3, sampled))
    expected, again = requests(3, sampled), requests(3, sampled)
    model.engine.run(expected)
    with no_hidden_sync():
        model.engine.run(again)
    assert [r.generated for r in again] == [r.generated for r in expected]


def test_graphs_are_bounded_and_stay(model: PreTrainedModel) -> None:
    def all_sizes() -> list[torch.Tensor]:
        torch.manual_seed(0)
        sizes = [(1, 5, 30), (3, 9, 7), (1, 40, 3), (8, 17, 50), (3, 33, 12)]
        return [
            model.generate(torch.randint(3, 128, (rows, length), device="cuda"), max_new_tokens=new, **OPTIONS)
            for rows, length, new in sizes
        ]

    first = all_sizes()
    for _ in range(2):  # buffers grow once to the largest call; then every size is met twice
        second = all_sizes()
    captures, runner = model.engine.runner.captures, model.engine.runner
    third = all_sizes()
    assert model.engine.runner is runner and runner.captures == captures
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(first, second, third))


def test_a_short_call_bakes_no_length_into_a_graph(model: PreTrainedModel) -> None:
    ids = torch.randint(3, 128, (1, 600), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    for _ in range(3):
        model.generate(ids[:, :8], max_new_tokens=4, **OPTIONS)
    captured = model.generate(ids, max_new_tokens=300, **OPTIONS)
    model.engine.use_graphs, model.engine.runner = False, None
    plain = model.generate(ids, max_new_tokens=300, **OPTIONS)
    model.engine.use_graphs, model.engine.runner = True, None
    assert (captured != plain).float().mean() < 0.02  # bf16: a near tie may fall either way once


def test_memory_comes_back(model: PreTrainedModel) -> None:
    def load() -> int:
        config = AutoConfig.for_model("qwen3", **{**COMMON, "hidden_size": 512, "head_dim": 64})
        other = AutoModelForCausalLM.from_config(config, dtype="bfloat16", device_map="cuda", seed=0)
        other.generate(torch.tensor([[3, 4, 5]], device="cuda"), max_new_tokens=3, **OPTIONS)
        del other
        import gc

        gc.collect()
        return torch.cuda.memory_allocated()

    load()
    flat = load()
    assert all(load() <= flat for _ in range(5))


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text"])
def exact(request: pytest.FixtureRequest) -> PreTrainedModel:
    """In float32, where another order of sums changes no token."""
    options = {"head_dim": 64, **({"sliding_window": 24} if request.param == "gemma3_text" else {})}
    config = AutoConfig.for_model(request.param, **{**COMMON, **options})
    return AutoModelForCausalLM.from_config(config, dtype="float32", device_map="cuda", seed=0)


def work(**options: object) -> list[Request]:
    """Prompts of many lengths, some alike, some that repeat themselves."""
    draw = torch.Generator().manual_seed(0)
    made = [torch.randint(3, 128, (n,), generator=draw).tolist() for n in (5, 300, 70, 33, 129, 64, 1, 200)]
    prompts = [*made, made[1][:192] + made[2], made[3] * 5, made[1]]
    return [Request(prompt=p, max_new_tokens=30 + 11 * i, **options) for i, p in enumerate(prompts)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain(exact: PreTrainedModel) -> list[list[int]]:
    """The tokens of plain PyTorch, each request alone."""
    exact.set_kernels("reference")
    requests = work()
    for request in requests:
        exact.engine.run([request])
    exact.set_kernels("auto")
    return [r.generated for r in requests]


@pytest.mark.parametrize("max_batch_tokens", [16, 100, 8192])
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("drafts", [None, Drafts(count=4)], ids=str)
def test_the_same_tokens_however_steps_are_cut(
    exact: PreTrainedModel,
    plain: list[list[int]],
    max_batch_tokens: int,
    tight: bool,
    drafts: Drafts | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks and decodes in captured steps, with prefix hits, preemption and guessed tokens."""
    if tight:
        pages = 9 if exact.config.model_type == "qwen3" else 18  # gemma3 has two groups of layers or more
        monkeypatch.setattr(engine_module, "needed", lambda *_: Capacity(rows=8, length=1024, pages=pages, eos=8))
    engine = Engine(exact, max_batch_tokens=max_batch_tokens)
    for _ in range(3):  # without graphs, while they are captured, and from them
        requests = work(drafts=drafts)
        engine.run(requests)
        assert [r.generated for r in requests] == plain
    assert engine.planner is not None and engine.runner is not None
    stats = engine.planner.stats()
    assert stats.num_free + stats.num_cached == stats.num_blocks and engine.runner.captures > 0
    assert stats.hit_tokens > 0
    if exact.config.model_type == "qwen3":  # windows give pages back, so that gemma3 seldom lacks any
        assert (stats.preemptions > 0) == tight


def test_log_probabilities_are_those_of_the_forward_pass(exact: PreTrainedModel) -> None:
    requests = [Request(prompt=[3 + i, 4, 5, 6] * 20, max_new_tokens=9, logprobs=5 * i) for i in range(3)]
    for _ in range(3):
        for request in requests:
            request.generated, request.finish, request.token_logprobs, request.top_logprobs = [], None, [], []
        exact.engine.run(requests)
    for i, request in enumerate(requests):
        with torch.no_grad():
            logits = exact(torch.tensor([request.context], device="cuda")).logits[0, len(request.prompt) - 1 : -1]
        rows = logits.float().log_softmax(-1).cpu()
        chosen = rows.gather(1, torch.tensor(request.generated)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(request.token_logprobs), chosen, rtol=1e-4, atol=1e-4)
        assert [[t for t, _ in best] for best in request.top_logprobs] == rows.topk(5 * i).indices.tolist()


def test_an_fp8_cache_runs_in_graphs_without_waiting(model: PreTrainedModel) -> None:
    """With pages of 64 tokens that fill, and prompts that are cut."""

    def work() -> list[Request]:
        prompts = [[3 + (7 * i + j) % 120 for j in range(90 + 30 * i)] for i in range(3)]
        return [Request(prompt=prompt, max_new_tokens=60, logprobs=0) for prompt in prompts]

    plain, engine, runs = Engine(model), Engine(model, kv_cache_dtype="fp8", max_batch_tokens=128), []
    for used in (plain, engine, engine, engine):
        runs.append(work())
        used.run(runs[-1])
    again = work()
    with no_hidden_sync():
        engine.run(again)
    assert [r.generated for r in again] == [r.generated for r in runs[-1]]
    assert engine.runner is not None and engine.runner.captures and plain.runner is not None
    assert engine.runner.cache_bytes / engine.runner.capacity.pages == 68 / 128 * (
        plain.runner.cache_bytes / plain.runner.capacity.pages
    )
    first = [[r.token_logprobs[0] for r in requests] for requests in (runs[0], again)]
    assert all(abs(a - b) < 1 for a, b in zip(*first)) and first[0] != first[1]
