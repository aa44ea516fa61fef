"""Penalties, biases and bans of `generate`: transformers' tokens, without a step that leaves its graph."""

import math

import pytest
import torch
from models.checkpoints import oracle, shared, tokens
from torch import Tensor

from cuformers.engine.group import Group
from cuformers.generation import fused
from cuformers.generation.logits_processors import FrequencyPenaltyLogitsProcessor, PresencePenaltyLogitsProcessor

NAME = "llama"


def run(model, ids: Tensor, **options):
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


@pytest.fixture
def processed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each step that leaves its graph at the logits."""
    steps: list[int] = []
    process = Group.process
    monkeypatch.setattr(Group, "process", lambda *args: (steps.append(1), process(*args))[1])
    return steps


FREE = [int(t) for t in run(shared(NAME), tokens(3, 6), eos_token_id=None)[0, 6:]]
"""What the first row says when nothing is asked for."""


@pytest.mark.parametrize("options", [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"min_new_tokens": 9, "eos_token_id": FREE[1]},
    {"min_length": 12, "max_length": 18, "max_new_tokens": None, "eos_token_id": [FREE[0], FREE[2], 10**6]},
    {"bad_words_ids": [[t] for t in FREE[:8]]},
    {"bad_words_ids": [[FREE[0]], [FREE[2]]], "eos_token_id": FREE[2]},
    {"suppress_tokens": FREE[3:9]},
    {"sequence_bias": {(FREE[0],): -6.0, (12,): 4.0, (FREE[5],): -math.inf}},
    {"sequence_bias": [[[12], 3.0], [[40], 2.5]], "repetition_penalty": 1.8, "bad_words_ids": [[FREE[1]], [12]]},
    {"repetition_penalty": 1.3, "suppress_tokens": FREE[:3], "min_new_tokens": 5, "eos_token_id": [FREE[4], 40],
     "sequence_bias": {(40,): 9.0}, "bad_words_ids": [[FREE[4]], [7]], "renormalize_logits": True},
], ids=lambda options: "+".join(options))  # fmt: skip
def test_options_give_transformers_tokens(options: dict, processed: list[int]) -> None:
    ours, theirs = (run(model, tokens(3, 6), **options) for model in (shared(NAME), oracle(NAME)))
    assert torch.equal(ours, theirs) and not processed
    plain = run(shared(NAME), tokens(3, 6), eos_token_id=options.get("eos_token_id"))
    assert ours.shape != plain.shape or not torch.equal(ours, plain), "the options changed nothing"


@pytest.mark.parametrize("option, processor", [
    ("frequency_penalty", FrequencyPenaltyLogitsProcessor), ("presence_penalty", PresencePenaltyLogitsProcessor),
])  # fmt: skip
def test_penalties_of_the_answer_are_the_processors(option: str, processor: type, processed: list[int]) -> None:
    """Transformers has no such options, but takes the processors."""
    for value in (1.7, -0.8):
        ours = run(shared(NAME), tokens(3, 6), eos_token_id=None, **{option: value})
        assert not processed
        theirs = run(oracle(NAME), tokens(3, 6), eos_token_id=None, logits_processor=[processor(value, 6)])
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", [
    {"bad_words_ids": [[5], [17, 30]]},
    {"sequence_bias": {(12,): 4.0, (40, 41): -3.0}},
    {"no_repeat_ngram_size": 2},
    {"begin_suppress_tokens": [FREE[0]]},
    {"forced_eos_token_id": 3},
    {"remove_invalid_values": True},
    {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 11},
    {"output_scores": True, "return_dict_in_generate": True},
    {"output_logits": True, "return_dict_in_generate": True},
], ids=lambda options: "+".join(options))  # fmt: skip
def test_what_else_is_asked_for_takes_processors(options: dict, processed: list[int]) -> None:
    """All of the call's options, as some come between others."""
    options = {"repetition_penalty": 1.4, "eos_token_id": None, **options}
    ours, theirs = (run(model, tokens(3, 6), **options) for model in (shared(NAME), oracle(NAME)))
    assert torch.equal(*(out if isinstance(out, Tensor) else out.sequences for out in (ours, theirs))) and processed


def test_very_many_biased_tokens_take_processors(monkeypatch: pytest.MonkeyPatch, processed: list[int]) -> None:
    monkeypatch.setattr(fused, "MAX_BIASED", 4)
    options = {"suppress_tokens": FREE[:3] * 2, "bad_words_ids": [[FREE[3]]], "eos_token_id": None}
    for count, more in enumerate(({}, {"sequence_bias": {(FREE[4],): -9.0}})):
        ours, theirs = (run(model, tokens(3, 6), **options, **more) for model in (shared(NAME), oracle(NAME)))
        assert torch.equal(ours, theirs) and bool(processed) == bool(count)


def test_processors_and_prefixes_of_the_user_take_processors(processed: list[int]) -> None:
    own = {"logits_processor": [FrequencyPenaltyLogitsProcessor(1.0, 6)], "repetition_penalty": 1.4}
    ours, theirs = (run(model, tokens(3, 6), eos_token_id=None, **own) for model in (shared(NAME), oracle(NAME)))
    assert torch.equal(ours, theirs) and len(processed) == 20
    allowed = {"prefix_allowed_tokens_fn": lambda row, ids: [5, 6, 7], "repetition_penalty": 1.4}
    ours, theirs = (run(model, tokens(3, 6), eos_token_id=None, **allowed) for model in (shared(NAME), oracle(NAME)))
    assert torch.equal(ours, theirs) and len(processed) == 40


def test_padding_is_no_history() -> None:
    lengths, ids = (2, 6, 4), tokens(3, 6)
    mask = torch.tensor([[0] * (6 - n) + [1] * n for n in lengths])
    options = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": None, "pad_token_id": FREE[0],
               "repetition_penalty": 1.5, "frequency_penalty": 0.5}  # fmt: skip
    together = shared(NAME).generate(ids, attention_mask=mask, **options)[:, 6:]
    for row, length in enumerate(lengths):
        assert torch.equal(run(shared(NAME), ids[row : row + 1, 6 - length :], **options)[0, length:], together[row])


@pytest.mark.parametrize("option, value", [
    ("sequence_bias", {(128,): 1.0}), ("bad_words_ids", [[3], [200]]), ("suppress_tokens", [4, 128]),
])  # fmt: skip
def test_tokens_outside_the_vocabulary_are_refused(option: str, value: object, processed: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"{option}.*0 to 127"):
        run(shared(NAME), tokens(1, 4), **{option: value})


def test_guessed_tokens_and_penalties_give_the_same_answer() -> None:
    ids = tokens(1, 5).repeat(1, 4)
    options = {"repetition_penalty": 1.2, "eos_token_id": None, "max_new_tokens": 30}
    plain = run(shared(NAME), ids, **options)
    assert torch.equal(plain, run(shared(NAME), ids, prompt_lookup_num_tokens=4, **options))


def test_log_probabilities_are_those_without_penalties(processed: list[int]) -> None:
    options = {"repetition_penalty": 1.6, "suppress_tokens": FREE[:2], "eos_token_id": None}
    out = run(shared(NAME), tokens(3, 6), output_logprobs=True, return_dict_in_generate=True, **options)
    assert not processed
    with torch.no_grad():
        rows = shared(NAME)(out.sequences).logits[:, 5:-1].log_softmax(-1)
    torch.testing.assert_close(out.logprobs, rows.gather(2, out.sequences[:, 6:, None])[..., 0], rtol=1e-5, atol=1e-5)
