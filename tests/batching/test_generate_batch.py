"""generate_batch and the manager on real (tiny) models: the tokens of generate, whatever runs beside them."""

import copy
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from models.checkpoints import load, oracle, shared, tokens

from cuformers.auto.batching.output import RequestStatus
from cuformers.generation.batching_config import ContinuousBatchingConfig
from cuformers.generation.config import GenerationConfig
from cuformers.nn.kernel_module import set_kernels
from tests.batching.fake import needs_logprobs

CONFIG = ContinuousBatchingConfig(max_requests_per_batch=4, num_blocks=8)
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [tokens(1, 3 + 5 * i % 17, seed=i)[0].tolist() for i in range(9)]


@pytest.fixture
def model() -> Iterator:
    made = load("llama")
    yield made
    made.destroy_cached_continuous_batching_manager()


def alone(prompt: list[int], name: str = "llama", **options) -> list[int]:
    ids = torch.tensor([prompt])
    whole = shared(name).generate(ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **options})
    return whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_the_tokens_of_generate(name: str, prompts: list[list[int]]) -> None:
    got = load(name).generate_batch(prompts, continuous_batching_config=CONFIG, max_new_tokens=12, **GREEDY)
    assert [o.prompt_ids for o in got.values()] == prompts
    assert [o.generated_tokens for o in got.values()] == [alone(p, name, max_new_tokens=12) for p in prompts]
    assert all(o.status is RequestStatus.FINISHED and o.request_id == key for key, o in got.items())


def test_the_tokens_of_transformers(prompts: list[list[int]], model) -> None:
    ours = model.generate_batch(prompts, GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1), CONFIG)
    for prompt, output in zip(prompts, ours.values()):
        ids = torch.tensor([prompt])
        theirs = oracle("llama").generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **GREEDY)
        assert output.generated_tokens == theirs[0, len(prompt) :].tolist()
    assert list(ours) == [f"req_{i}" for i in range(9)]


def test_a_config_for_each_prompt(prompts: list[list[int]], model) -> None:
    configs = [GenerationConfig(max_new_tokens=2 + i, repetition_penalty=1.0 + i / 4) for i in range(3)]
    got = model.generate_batch(prompts[:3], configs, CONFIG, **GREEDY)
    for prompt, config, output in zip(prompts, configs, got.values()):
        assert output.generated_tokens == alone(prompt, generation_config=config)
    with pytest.raises(ValueError, match="a list of 9"):
        model.generate_batch(prompts, configs, CONFIG)


def test_each_request_has_penalties_of_its_own(prompts: list[list[int]], model) -> None:
    """Beside others with none, with processors, or with other seeds: what `generate` gives for it alone."""
    ways: list[dict] = [
        {},
        {"repetition_penalty": 1.5, "bad_words_ids": [[t] for t in range(20, 40)]},
        {"do_sample": True, "seed": 3},
        {"do_sample": True, "seed": 3, "frequency_penalty": 1.0, "sequence_bias": {(9,): 5.0}},
        {"no_repeat_ngram_size": 1, "repetition_penalty": 1.5},
        {"suppress_tokens": list(range(60))},
        {"presence_penalty": 2.0, "min_new_tokens": 10, "eos_token_id": list(range(60, 90))},
    ]
    configs = [GenerationConfig(max_new_tokens=6 + 5 * i, **way) for i, way in enumerate(ways)]
    many = prompts[: len(ways)]
    got = model.generate_batch(many, configs, CONFIG, pad_token_id=0)
    for prompt, way, config, output in zip(many, ways, configs, got.values()):
        ids = torch.tensor([prompt])
        want = shared("llama").generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
        assert output.generated_tokens == want[0, len(prompt) :].tolist(), way


def test_a_token_outside_the_vocabulary_fails_alone(prompts: list[list[int]], model) -> None:
    configs = [GenerationConfig(max_new_tokens=3, **way) for way in ({}, {"suppress_tokens": [128]})]
    good, bad = model.generate_batch(prompts[:2], configs, CONFIG, **GREEDY).values()
    assert good.status is RequestStatus.FINISHED and bad.status is RequestStatus.FAILED
    assert "suppress_tokens" in bad.error and "0 to 127" in bad.error


def test_sampling_draws_as_generate_does(prompts: list[list[int]], model) -> None:
    same = [prompts[2]] * 3
    options = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 10, "seed": 4}
    got = model.generate_batch(same, None, CONFIG, num_return_sequences=2, **options)
    ids = torch.tensor(same)
    want = model.generate(ids, attention_mask=torch.ones_like(ids), num_return_sequences=2, **options)
    assert [o.generated_tokens for o in got.values()] == want[:, len(prompts[2]) :].tolist()
    assert [re.sub(r"\d+", "#", key, count=1) for key in got] == ["req_#", "req_#__child#0"] * 3


def test_bad_prompts_fail_alone(prompts: list[list[int]], model) -> None:
    inputs = [prompts[0], [], prompts[1], [3, 128], [3] * 30, prompts[2]]
    small = ContinuousBatchingConfig(max_requests_per_batch=4, num_blocks=1, block_size=64)
    got = list(model.generate_batch(inputs, None, small, max_new_tokens=40, **GREEDY).values())
    assert [o.status.name for o in got] == ["FINISHED", "FAILED", "FINISHED", "FAILED", "FAILED", "FINISHED"]
    assert [bool(o.error) for o in got] == [False, True, False, True, True, False]
    for i in (0, 2, 5):
        assert got[i].generated_tokens == alone(inputs[i], max_new_tokens=40)


def test_what_no_prompt_can_run_with_raises(prompts: list[list[int]], model) -> None:
    for options in ({"temprature": 1}, {"temperature": -1.0}, {"num_beams": 3}, {"num_return_sequences": 2}):
        with pytest.raises(ValueError, match=next(iter(options))):
            model.generate_batch(prompts, None, CONFIG, **options)
    with pytest.raises(ValueError, match="use_cuda_graph"):
        model.generate_batch(prompts, None, ContinuousBatchingConfig(use_cuda_graph=True), max_new_tokens=2)
    assert model.generate_batch([], None, CONFIG) == {}


def test_a_kept_manager(prompts: list[list[int]], model) -> None:
    first = model.generate_batch(prompts, None, CONFIG, persistent_manager=True, max_new_tokens=6, **GREEDY)
    kept = model.init_continuous_batching(continuous_batching_config=CONFIG)
    assert kept._worker.engine is not None and not kept.is_running()
    second = model.generate_batch(prompts, None, CONFIG, persistent_manager=True, max_new_tokens=6, **GREEDY)
    assert model.init_continuous_batching() is kept and not first.keys() & second.keys()
    assert [o.generated_tokens for o in first.values()] == [o.generated_tokens for o in second.values()]
    other = ContinuousBatchingConfig(max_requests_per_batch=2, num_blocks=8)
    model.generate_batch(prompts[:1], None, other, max_new_tokens=2)
    assert kept._worker.engine is None and model.init_continuous_batching() is not kept


def test_changed_weights_forget_the_cache(prompts: list[list[int]], model) -> None:
    options = {"persistent_manager": True, "max_new_tokens": 6, **GREEDY}
    long = [prompts[0] * 40]
    model.generate_batch(long, None, CONFIG, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    got = model.generate_batch(long, None, CONFIG, **options)
    ids = torch.tensor(long)
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **GREEDY)
    assert next(iter(got.values())).generated_tokens == want[0, len(long[0]) :].tolist()


def test_training_while_a_manager_pauses(prompts: list[list[int]], model) -> None:
    twin = load("llama")
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        for _ in range(2):
            manager.get_result(manager.add_request(prompts[0], max_new_tokens=4))
            assert manager.pause()
            for one in (model, twin):
                one.train()
                one(torch.tensor([prompts[1]]), labels=torch.tensor([prompts[1]])).loss.backward()
                with torch.no_grad():
                    for parameter in one.parameters():
                        parameter.sub_(0.1 * parameter.grad)
                        parameter.grad = None
                one.eval()
            manager.resume()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


def test_a_kept_manager_notices_other_kernels(prompts: list[list[int]], model) -> None:
    options = {"persistent_manager": True, "max_new_tokens": 6, **GREEDY}
    model.generate_batch(prompts[:1], None, CONFIG, **options)
    engine = model.init_continuous_batching()._worker.engine.engine
    first = engine.runner
    model.train()
    model.eval()
    model.generate_batch(prompts[:1], None, CONFIG, **options)
    assert engine.runner is first, "the kernels are what they were"
    calls, plain = [], model.ops
    set_kernels(model, replace(plain, argmax=lambda logits: (calls.append(1), plain.argmax(logits))[1]))
    got = model.generate_batch(prompts, None, CONFIG, **options)
    assert engine.runner is not first and calls
    assert [o.generated_tokens for o in got.values()] == [alone(p, max_new_tokens=6) for p in prompts]
    second = engine.runner
    model.set_attn_implementation("eager")
    model.generate_batch(prompts[:1], None, CONFIG, **options)
    assert engine.runner is not second and engine.backend is model.backend


@pytest.mark.parametrize("drafts", [None, 3])
def test_requests_go_on_with_other_kernels(drafts: int | None, prompts: list[list[int]], model) -> None:
    options = {"max_new_tokens": 60, "prompt_lookup_num_tokens": drafts, **GREEDY}
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        ids = manager.add_requests(prompts, streaming=True, **options)
        while len(manager.get_result(ids[0]).generated_tokens) < 5:
            pass
        assert manager.pause()
        runner, plain = manager._worker.engine.engine.runner, model.ops
        set_kernels(model, replace(plain, argmax=lambda logits: plain.argmax(logits)))
        manager.resume()
        got = [list(manager.request_id_iter(i))[-1].generated_tokens for i in ids]
        assert manager._worker.engine.engine.runner is not runner
    assert got == [alone(p, max_new_tokens=60) for p in prompts]


@pytest.mark.parametrize("margin", [0.0, 0.9])
def test_a_safety_margin_leaves_room(margin: float, prompts: list[list[int]], model) -> None:
    config = ContinuousBatchingConfig(max_requests_per_batch=8, num_blocks=10, block_size=64, safety_margin=margin)
    most = []
    with model.continuous_batching_context_manager(continuous_batching_config=config, warmup=False) as manager:
        manager.pause()
        ids = manager.add_requests(prompts, max_new_tokens=20, **GREEDY)
        step = manager._worker.engine.step
        manager._worker.engine.step = lambda: (step(), most.append(manager._worker.engine.stats.num_running))[0]
        manager.resume()
        got = [manager.get_result(i).generated_tokens for i in ids]
    assert got == [alone(p, max_new_tokens=20) for p in prompts]
    assert max(most) == (8 if margin == 0 else 1)


@pytest.mark.parametrize("space", [0.0, 0.01])
def test_more_at_once_than_the_cache_holds(prompts: list[list[int]], model, space: float) -> None:
    config = ContinuousBatchingConfig(
        max_requests_per_batch=16, num_blocks=3, block_size=64, cpu_offload_space=space
    )
    many = prompts * 4
    got = model.generate_batch(many, None, config, max_new_tokens=70, **GREEDY)
    want = {tuple(p): alone(p, max_new_tokens=70) for p in prompts}
    assert [o.generated_tokens for o in got.values()] == [want[tuple(p)] for p in many]


def test_more_host_memory_than_there_is(prompts: list[list[int]], model) -> None:
    config = ContinuousBatchingConfig(cpu_offload_space=1e9)
    with pytest.raises(ValueError, match=r"cpu_offload_space=1000000000.*safety_threshold"):
        model.generate_batch(prompts, None, config, max_new_tokens=2, **GREEDY)


def test_prompts_that_fill_pages_and_come_twice(model) -> None:
    twice = [tokens(1, 128, seed=7)[0].tolist()] * 3
    got = list(model.generate_batch(twice, None, CONFIG, max_new_tokens=5, **GREEDY).values())
    assert all(o.generated_tokens == alone(twice[0], max_new_tokens=5) for o in got)


@needs_logprobs
def test_log_probabilities(prompts: list[list[int]], model) -> None:
    config = ContinuousBatchingConfig(max_requests_per_batch=4, num_blocks=8, return_logprobs=True)
    got = model.generate_batch(prompts[:3], None, config, max_new_tokens=6, **GREEDY)
    for prompt, output in zip(prompts, got.values()):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.generated_tokens])).logits[0, len(prompt) - 1 : -1]
        want = logits.log_softmax(-1)[range(6), output.generated_tokens]
        torch.testing.assert_close(torch.tensor(output.logprobs), want, atol=1e-4, rtol=1e-4)


def likeliest(rows: torch.Tensor, top: int) -> list[list[int]]:
    return rows.topk(top).indices.tolist()


@pytest.mark.parametrize("max_batch_tokens", [None, 8])
def test_likeliest_tokens_of_prompts_and_answers(max_batch_tokens: int | None, prompts: list[list[int]], model) -> None:
    config = ContinuousBatchingConfig(max_requests_per_batch=4, num_blocks=8, max_batch_tokens=max_batch_tokens)
    wants = {"logprobs": 3, "prompt_logprobs": 2}
    got = model.generate_batch(prompts[:4], None, config, max_new_tokens=6, **wants, **GREEDY)
    for prompt, output in zip(prompts, got.values()):
        with torch.no_grad():
            rows = model(torch.tensor([prompt + output.generated_tokens])).logits[0].log_softmax(-1)
        asked, answered = rows[: len(prompt) - 1], rows[len(prompt) - 1 : -1]
        assert output.prompt_logprobs[0] is None and output.prompt_top_logprobs[0] is None
        said = torch.tensor(output.prompt_logprobs[1:])
        torch.testing.assert_close(said, asked[range(len(asked)), prompt[1:]], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            torch.tensor(output.logprobs), answered[range(6), output.generated_tokens], atol=1e-4, rtol=1e-4
        )
        assert [[t for t, _ in one] for one in output.prompt_top_logprobs[1:]] == likeliest(asked, 2)
        assert [[t for t, _ in one] for one in output.top_logprobs] == likeliest(answered, 3)
        assert [one[0][1] for one in output.top_logprobs] == output.logprobs, "greedy"


def test_log_probabilities_are_there_when_asked_for(prompts: list[list[int]], model) -> None:
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        ask = {"max_new_tokens": 3, **GREEDY}
        plain = manager.get_result(manager.add_request(prompts[1], **ask))
        assert plain.logprobs == plain.top_logprobs == plain.prompt_logprobs == plain.prompt_top_logprobs == []
        chosen = manager.get_result(manager.add_request(prompts[1], logprobs=0, prompt_logprobs=0, **ask))
        assert len(chosen.logprobs) == 3 and len(chosen.prompt_logprobs) == len(prompts[1])
        assert chosen.top_logprobs == chosen.prompt_top_logprobs == []
        name = manager.add_request(prompts[1], streaming=True, logprobs=1, prompt_logprobs=1, **ask)
        for count, output in enumerate(manager.request_id_iter(name), 1):
            assert len(output.logprobs) == len(output.top_logprobs) == len(output.generated_tokens) == min(count, 3)
            assert output.prompt_logprobs == chosen.prompt_logprobs
        drawn = {"max_new_tokens": 3, "do_sample": True, "num_return_sequences": 2, "seed": 1}
        name = manager.add_request(prompts[1], prompt_logprobs=0, **drawn)
        assert manager.get_result(name).prompt_logprobs == chosen.prompt_logprobs
        assert manager.get_result(f"{name}__child#0").prompt_logprobs == []


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_is_for_terminals(prompts, model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUFORMERS_NO_PROGRESS", raising=False)
    shown = {}
    for kind in (_Terminal, io.StringIO):
        monkeypatch.setattr(sys, "stderr", kind())
        model.generate_batch(prompts, None, CONFIG, progress_bar=True, max_new_tokens=4, **GREEDY)
        shown[kind] = sys.stderr.getvalue()
    assert "9/9" in shown[_Terminal] and "tokens/s" in shown[_Terminal] and "of the cache" in shown[_Terminal]
    assert "9/9" not in shown[io.StringIO]


def test_a_copy_of_a_model_that_has_generated(prompts: list[list[int]], model) -> None:
    options = {"max_new_tokens": 6, **GREEDY}
    mine = model.generate_batch(prompts, None, CONFIG, persistent_manager=True, **options)
    ids = torch.tensor(prompts[:1])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **GREEDY)
    twin = copy.deepcopy(model)
    assert twin.engine.model is twin and twin.engine is not model.engine
    its = twin.generate_batch(prompts, None, CONFIG, **options)
    assert [o.generated_tokens for o in its.values()] == [o.generated_tokens for o in mine.values()]
