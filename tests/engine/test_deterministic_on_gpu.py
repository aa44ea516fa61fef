"""deterministic=True: tokens and log-probabilities, bit by bit, however they are computed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.auto.config import AutoConfig
from cuformers.auto.model import PreTrainedModel
from cuformers.engine import engine as engine_module
from cuformers.engine.capacity import Capacity
from cuformers.engine.engine import Engine
from cuformers.engine.group import Group
from cuformers.engine.request import Drafts, Request, Sampling, TokenPenalties
from cuformers.generation.logits_processors import SuppressTokensLogitsProcessor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, "bfloat16"),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}, "float16"),
    "gemma2": ("gemma2", {"sliding_window": 100, "query_pre_attn_scalar": 64}, "bfloat16"),
    "olmo2": ("olmo2", {}, "bfloat16"),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True},
        "bfloat16",
    ),
    "llama-float32": ("llama", {"attention_bias": True}, "float32"),
}
LENGTHS = (5, 50, 64, 130, 300, 700, 1)
NEW = 20


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    name, options, dtype = MODELS[request.param]
    config = AutoConfig.for_model(name, **SIZES, **options)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, device_map="cuda", seed=0, deterministic=True)


def prompt(number: int) -> list[int]:
    """Prompts of many lengths; numbers 3 and 4, 10 and 11, ... begin alike."""
    generator = torch.Generator().manual_seed(number - number % 7)
    tokens = torch.randint(3, 1000, (max(LENGTHS),), generator=generator).tolist()
    return tokens[: LENGTHS[number % 7]]


def request(number: int, sampled: bool = True) -> Request:
    """Every other one is sampled."""
    way = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=number) if sampled and number % 2 else Sampling()
    return Request(prompt=prompt(number), max_new_tokens=NEW, sampling=way, logprobs=5)


def result(r: Request) -> tuple[list[int], list[float], list[list[tuple[int, float]]]]:
    assert len(r.generated) == NEW and all(p == p for p in r.token_logprobs)
    return r.generated, r.token_logprobs, r.top_logprobs


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel) -> dict[int, Any]:
    """Each of the first seven requests by itself, without graphs, cache or chunks."""
    engine = Engine(model, use_graphs=False, prefix_cache=False)
    results = {}
    for number in range(7):
        engine.run([one := request(number)])
        results[number] = result(one)
    assert len({tuple(tokens) for tokens, _, _ in results.values()}) == 7
    return results


@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("max_batch_tokens", [64, 1000, 8192])
@pytest.mark.parametrize("count", [1, 7, 64])
def test_batch_chunks_graphs_and_cache_change_no_bit(
    model: PreTrainedModel, alone: dict[int, Any], count: int, max_batch_tokens: int, use_graphs: bool
) -> None:
    """Three times the same requests: the second time graphs are captured, the third they are replayed; from the second
    on prompts come from the cache."""
    engine = Engine(model, use_graphs=use_graphs, max_batch_tokens=max_batch_tokens)
    for again in range(3):
        requests = [request(number) for number in range(count)]
        engine.run(requests)
        for number in range(min(count, 7)):
            assert result(requests[number]) == alone[number], f"request {number}, time {again}"


def test_preemption_changes_no_bit(
    model: PreTrainedModel, alone: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that nearly fill a page, and outgrow it, in a pool that holds few of them."""
    groups = len({spec.window for spec in model.model.attention_specs})
    small = Capacity(rows=8, length=512, pages=9 * groups, eos=8)
    monkeypatch.setattr(engine_module, "needed", lambda *_: small)
    engine = Engine(model, prefix_cache=False)
    numbers = (1, 1, 1, 2, 1, 4, 1, 3, 1)
    engine.run(requests := [request(number) for number in numbers])
    assert engine.planner is not None and engine.planner.stats().preemptions > 0
    for number, one in zip(numbers, requests, strict=True):
        assert result(one) == alone[number], f"request {number}"


def test_guessed_tokens_change_no_bit(model: PreTrainedModel, alone: dict[int, Any]) -> None:
    """Steps that take several tokens of a row."""
    engine = Engine(model)
    for _ in range(3):
        requests = [request(number) for number in range(7)]
        for one in requests:
            one.logprobs, one.drafts = None, Drafts(count=3)
        engine.run(requests)
        assert [one.generated for one in requests] == [alone[number][0] for number in range(7)]


def penalized(number: int, banned: int) -> Request:
    """A request with penalties, and a token that it may not say."""
    one = request(number)
    bias = ((number, 3.0), (banned, -torch.inf)) if banned != number else ((banned, -torch.inf),)
    one.penalties = TokenPenalties(repetition=1.2 + number / 10, frequency=0.1 * number, presence=0.3, bias=bias)
    return one


@pytest.mark.parametrize("processors", [False, True])
def test_penalties_of_others_change_no_bit(model: PreTrainedModel, alone: dict[int, Any], processors: bool) -> None:
    """Nor do one's own depend on others; with processors beside them steps leave their graphs."""
    engine, own = Engine(model, use_graphs=False, prefix_cache=False), []
    banned = [alone[number][0][0] for number in range(7)]
    for number in range(7):
        engine.run([one := penalized(number, banned[number])])
        own.append(result(one))
    assert all(own[number] != alone[number] for number in range(7)), "the penalties change nothing"
    engine = Engine(model)
    for _ in range(3):
        pairs = [(request(number), penalized(number, banned[number])) for number in range(7)]
        mixed = [one for pair in pairs for one in pair]
        other = request(4)
        other.group = Group(processors=[SuppressTokensLogitsProcessor(range(500))]) if processors else None
        engine.run([*mixed, other])
        assert [result(one) for one in mixed[::2]] == [alone[number] for number in range(7)]
        assert [result(one) for one in mixed[1::2]] == own


@torch.no_grad()
def test_log_probabilities_of_prompts_are_those_of_a_plain_forward(model: PreTrainedModel) -> None:
    requests = [Request(prompt=prompt(n), max_new_tokens=1, prompt_logprobs=0) for n in range(7)]
    Engine(model, max_batch_tokens=100).run(requests)
    for one in requests:
        ids = torch.tensor([one.prompt], device="cuda")
        if len(one.prompt) > 1:
            expected = model.ops.logprobs(model(ids).logits[0, :-1], ids[0, 1:], 0).chosen
            assert torch.equal(torch.tensor(one.prompt_token_logprobs[1:], device="cuda"), expected)


def logprobs(model: PreTrainedModel, logits: Tensor, one: Request) -> Tensor:
    """Of the generated tokens, from the logits of prompt and answer."""
    at = slice(len(one.prompt) - 1, len(one.prompt) - 1 + NEW)
    tokens = torch.tensor(one.generated, device=logits.device)
    return model.ops.logprobs(logits[at], tokens, 0).chosen


@pytest.mark.parametrize("training", [False, True])
def test_a_plain_forward_gives_the_log_probabilities_of_generation(model: PreTrainedModel, training: bool) -> None:
    """One by one and padded to a batch; in training with gradients through all of it."""
    requests = [request(number) for number in range(7)]
    engine = Engine(model)
    engine.run(requests)
    longest = max(len(r.context) for r in requests)
    ids = torch.tensor([[0] * (longest - len(r.context)) + r.context for r in requests], device="cuda")
    mask = torch.tensor([[0] * (longest - len(r.context)) + [1] * len(r.context) for r in requests], device="cuda")
    model.train(training)
    try:
        with torch.set_grad_enabled(training):
            batch = model(ids, attention_mask=mask).logits
            assert batch.requires_grad == training
            for row, one in enumerate(requests):
                expected = torch.tensor(one.token_logprobs, device="cuda")
                single = model(torch.tensor([one.context], device="cuda")).logits[0]
                assert torch.equal(batch[row, -len(one.context) :], single)
                assert torch.equal(logprobs(model, single, one), expected)
                if training:
                    logprobs(model, single, one).sum().backward()
        missing = [name for name, p in model.named_parameters() if training and p.grad is None]
        assert not missing
    finally:
        model.zero_grad()
        model.eval()


def test_gradients_are_those_of_the_reference(model: PreTrainedModel) -> None:
    if model.dtype != torch.float32:
        pytest.skip("rounding of half precision hides what is wrong")
    ids = torch.tensor([prompt(4)], device="cuda")
    found = []
    for deterministic in (True, False):
        model.set_deterministic(deterministic)
        model.train()
        model(ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
    model.eval()
    model.set_deterministic(True)
    for name, one in found[0].items():
        other = found[1][name]
        assert one is not None and other is not None
        assert (one - other).norm() <= 1e-3 * other.norm() + 1e-6, name


def test_switching_it_on_and_off(model: PreTrainedModel, alone: dict[int, Any]) -> None:
    model.set_deterministic(False)
    assert not model.ops.deterministic and model.attn_implementation != "deterministic"
    model.set_deterministic()
    assert model.ops.deterministic and model.attn_implementation == "deterministic"
    model.engine.run([one := request(3)])
    assert result(one) == alone[3]
    with pytest.raises(ValueError, match="depend on the other rows"):
        model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="kernels='reference'"):
        model.set_kernels("reference")
