"""A thousand requests that can't run among a thousand that can: each of the former fails alone, with a reason."""

import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import transformers
from models.checkpoints import tokens
from models.families import COMMON

from cuformers.auto.batching.manager import ContinuousBatchingManager
from cuformers.auto.batching.output import RequestStatus
from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.auto.config import AutoConfig
from cuformers.auto.model import PreTrainedModel
from cuformers.generation.batching_config import ContinuousBatchingConfig

VOCABULARY = COMMON["vocab_size"]
LONGEST = 512
COUNT = 1000
NEW = 8
SOON = 30.0


class Bad(NamedTuple):
    """A request that can't run."""

    prompt: Any
    options: dict[str, Any]
    reason: str
    """Is part of the error, which names what is wrong."""


def prompts() -> Iterator[Bad]:
    for empty in ([], (), torch.tensor([]), numpy.array([])):
        yield Bad(empty, {}, "no token")
    for token in (-1, VOCABULARY, 2**31, 2**63, -(2**70)):
        yield Bad([3, token, 5], {}, f"input_ids={token} is not possible")
    for token in (None, "a", 4.0, math.nan, True, 3j, object()):
        yield Bad([3, token, 5], {}, "allowed is integers")
    for nested in ([[3, 4]], torch.tensor([[3, 4]]), numpy.array([[3], [4]])):
        yield Bad(nested, {}, "request of its own")
    for wrong in (torch.tensor([3.0]), numpy.array([3.5]), torch.tensor([True]), numpy.array([3, None])):
        yield Bad(wrong, {}, "allowed is integers")
    for other in (None, 7, b"text", {3: 4}, {3}, range(4), torch.tensor(3), object()):
        yield Bad(other, {}, "must be a list of token ids")
    yield Bad(torch.tensor([3], device="meta"), {}, "meta device")
    yield Bad("text", {}, "Tokenize the text first")
    yield Bad([3] * LONGEST, {}, "longer than the longest one here")


def options() -> Iterator[Bad]:
    wrong: dict[str, tuple[Any, ...]] = {
        "max_new_tokens": (0, -1, 1.5, "5", True, [3]),
        "temperature": (-1.0, math.nan, math.inf, "hot"),
        "top_k": (-1, 1.5, "x"),
        "top_p": (-0.1, 1.5, math.nan, "x"),
        "min_p": (-1, 2, "x"),
        "typical_p": (0, 2, "x"),
        "repetition_penalty": (0, -1.0, math.nan, "x"),
        "no_repeat_ngram_size": (-1, 1.5, "x"),
        "min_new_tokens": (-1, "x"),
        "max_time": (0, -1, math.nan, "x"),
        "eos_token_id": ("x", 1.5, [[1]], list(range(99))),
        "bad_words_ids": ([], [[]], [[VOCABULARY]], [[-1]], [3], "x"),
        "suppress_tokens": ([VOCABULARY], [-1], [1.5], 7, "x"),
        "sequence_bias": ({}, {(VOCABULARY,): 1.0}, "x"),
        "forced_bos_token_id": (VOCABULARY, "x"),
        "stop_strings": ("x", [], [""], [3], 3),
        "seed": ("x", 1.5, True, [1, 2]),
        "num_return_sequences": (0, 2, "x"),
        "num_beams": (0, 4, "x"),
        "do_sample": (2, "x"),
        "output_logprobs": (5, "x"),
        "output_scores": (True,),
        "guidance_scale": (2.0,),
        "priority": (None, 1.5, math.nan, "x", [1]),
        "cache_salt": (None, 5, [], {}),
        "logprobs": (-1, 33, 1.5, "x", True),
        "prompt_logprobs": (-1, 33, 1.5, "x", [1]),
    }
    for name, values in wrong.items():
        for value in values:
            yield Bad([3, 4, 5], {name: value}, name)
    yield Bad([3, 4, 5], {"max_new_tokens": 10**30}, "longer than the longest one here")
    yield Bad([3, 4, 5], {"do_sample": True, "temperature": 0.0}, "temperature=0.0")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = AutoConfig.for_model("llama", **{**COMMON, "num_hidden_layers": 1})
    return AutoModelForCausalLM.from_config(config, dtype="float32", device_map="cpu", seed=0)


@pytest.fixture
def manager(model: PreTrainedModel) -> Iterator[ContinuousBatchingManager]:
    config = ContinuousBatchingConfig(max_requests_per_batch=8, num_blocks=LONGEST // 64, block_size=64)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as made:
        yield made


def answers(model: PreTrainedModel) -> dict[tuple[int, ...], list[int]]:
    """Good prompts with NEW tokens that `generate` gives each."""
    known = {}
    for length in range(1, 31):
        ids = tokens(1, length, seed=length)
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        known[tuple(ids[0].tolist())] = whole[0, length:].tolist()
    return known


def test_a_thousand_malformed_among_a_thousand_good(
    model: PreTrainedModel, manager: ContinuousBatchingManager, capfd: pytest.CaptureFixture[str]
) -> None:
    rng, known, kinds = random.Random(0), answers(model), [*prompts(), *options()]
    want: dict[str, list[int]] = {}
    bad: dict[str, Bad] = {}
    for number in rng.sample(range(2 * COUNT), 2 * COUNT):
        if number < COUNT:
            kind = kinds[number % len(kinds)]
            bad[manager.add_request(kind.prompt, **{"max_new_tokens": 4, **kind.options})] = kind
        else:
            prompt, new = rng.choice(list(known)), rng.randint(1, NEW)
            name = manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1, priority=rng.randint(0, 1))
            want[name] = known[prompt][:new]
            if number % 10 == 0:
                with pytest.raises(ValueError, match=f"request_id='{name}' is in use"):
                    manager.add_request([3], name)
    outputs = [manager.get_result(timeout=SOON) for _ in range(2 * COUNT)]
    got = {output.request_id: output for output in outputs if output is not None}
    assert got.keys() == {*want, *bad} and manager.get_result(timeout=0.01) is None
    assert {name: got[name].generated_tokens for name in want} == want
    for name, kind in bad.items():
        output = got[name]
        assert output.status is RequestStatus.FAILED and output.generated_tokens == [], kind
        assert kind.reason in (output.error or ""), kind
    check_rest(manager, capfd)


def check_rest(manager: ContinuousBatchingManager, capfd: pytest.CaptureFixture[str]) -> None:
    """No step has broken, and nothing is left over."""
    stats = manager.stats
    assert stats is not None and stats.num_running == stats.num_waiting == 0
    assert stats.num_free + stats.num_cached == stats.num_blocks
    assert manager.is_running() and manager.fault is None and "failed" not in capfd.readouterr().err


def answered(manager: ContinuousBatchingManager, prompt: tuple[int, ...], **options: Any) -> list[int]:
    output = manager.get_result(manager.add_request(prompt, max_new_tokens=NEW, **options), timeout=SOON)
    assert output is not None and output.status is RequestStatus.FINISHED
    return output.generated_tokens


@pytest.mark.parametrize("config", [5, 0, {}, {"top_k": 3}, "x", transformers.GenerationConfig(top_k=3)])
def test_what_is_no_generation_config(
    model: PreTrainedModel, manager: ContinuousBatchingManager, config: object
) -> None:
    says = r"generation_config=(.|\n)*cuformers\.GenerationConfig or None"
    for act in (
        lambda: manager.add_request([3], generation_config=config),
        lambda: manager.add_requests([[3]], generation_config=config),
        lambda: model.init_continuous_batching(config),
        lambda: model.generate_batch([[3]], [config]),
        lambda: model.generate(torch.tensor([[3]]), config),
    ):
        with pytest.raises(ValueError, match=says):
            act()
    with pytest.raises(ValueError, match="generation_config="):
        model.generate_batch([[3]], config)
    assert answered(manager, (3, 4), do_sample=False)


def test_numbers_that_no_tensor_holds(model: PreTrainedModel, manager: ContinuousBatchingManager) -> None:
    """They mean what any number beyond the vocabulary means."""
    prompt, answer = next(iter(answers(model).items()))
    assert answered(manager, prompt, eos_token_id=[VOCABULARY, 2**63, 10**30]) == answer
    drawn = [answered(manager, prompt, do_sample=True, seed=2**80, top_k=k) for k in (0, VOCABULARY, 2**31, 10**30)]
    assert drawn == [drawn[0]] * 4


@pytest.mark.parametrize("config", [5, {}, {"num_blocks": 3}, transformers.GenerationConfig()])
def test_what_is_no_batching_config(model: PreTrainedModel, config: object) -> None:
    for act in (
        lambda: model.init_continuous_batching(None, config),
        lambda: model.continuous_batching_context_manager(continuous_batching_config=config),
        lambda: model.generate_batch([[3]], None, config),
    ):
        with pytest.raises(ValueError, match=r"continuous_batching_config=(.|\n)*cuformers\.ContinuousBatchingConfig"):
            act()


def test_no_more_likeliest_tokens_than_there_are() -> None:
    config = AutoConfig.for_model("llama", **{**COMMON, "vocab_size": 5})
    model = AutoModelForCausalLM.from_config(config, dtype="float32", device_map="cpu", seed=0)
    limits = ContinuousBatchingConfig(max_requests_per_batch=2, num_blocks=2)
    with model.continuous_batching_context_manager(None, continuous_batching_config=limits) as made:
        for wanted in ({"logprobs": 6}, {"prompt_logprobs": 6}):
            output = made.get_result(made.add_request([3, 4], max_new_tokens=3, **wanted), timeout=SOON)
            assert output is not None and output.status is RequestStatus.FAILED
            assert "=6 is not possible: allowed is None, or 0 to 5" in (output.error or "")
        name = made.add_request([3, 4], max_new_tokens=3, eos_token_id=-1, logprobs=3, prompt_logprobs=5)
        output = made.get_result(name, timeout=SOON)
        assert output is not None and [len(best) for best in output.top_logprobs] == [3] * 3, output
        assert output.prompt_top_logprobs[1] is not None and len(output.prompt_top_logprobs[1]) == 5
