"""Resolved options and the processors made of them, against what Transformers' generate makes of the same call."""

import math

import pytest
import torch
import transformers
from transformers import GenerationConfig as Theirs

from cuformers import generation as ours
from cuformers.base import log
from cuformers.generation import GenerationConfig, build_processors, fused_penalties, fused_warpers, resolve

from .oracle import VOCAB, assert_same_scores, random_ids, random_scores

PROMPT = 6


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", set())


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def theirs_of(model, config: dict | None, defaults: dict, kwargs: dict, ids: torch.Tensor, custom=()) -> tuple:
    """The config and processors of Transformers, by the steps of its generate."""
    model.generation_config = Theirs(**defaults)
    given = None if config is None else Theirs(**config)
    unset = {
        name: kwargs.get(name) is None
        and (given is None or getattr(given, name) is None)
        and defaults.get(name) is None
        for name in ("max_length", "min_length")
    }
    made, _ = model._prepare_generation_config(given, **kwargs)
    model._prepare_special_tokens(made, True, device="cpu", batch_size=ids.shape[0])
    made = model._prepare_generated_length(
        generation_config=made, has_default_max_length=unset["max_length"], has_default_min_length=unset["min_length"],
        model_input_name="input_ids", inputs_tensor=ids, input_ids_length=ids.shape[1],
    )  # fmt: skip
    model._validate_generated_length(made, ids.shape[1], unset["max_length"])
    processors = model._get_logits_processor(
        made, input_ids_seq_length=ids.shape[1], encoder_input_ids=ids, device="cpu",
        logits_processor=transformers.LogitsProcessorList(custom),
    )  # fmt: skip
    return made, processors


QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2, 3], "pad_token_id": 3}
LLAMA = {"max_length": 40, "eos_token_id": 2, "bos_token_id": 1, "temperature": 0.6, "top_p": 0.9}
CALLS: list[tuple[dict | None, dict, dict]] = [
    (None, {}, {}),
    (None, {}, {"max_new_tokens": 5}),
    (None, LLAMA, {}),
    (None, LLAMA, {"max_new_tokens": 5}),
    (None, LLAMA, {"do_sample": True}),
    (None, LLAMA, {"max_length": 30, "max_new_tokens": 3}),
    (None, QWEN, {}),
    (None, QWEN, {"do_sample": False}),
    (None, QWEN, {"top_k": None, "top_p": None, "eos_token_id": None}),
    ({"max_new_tokens": 9, "top_k": 5}, QWEN, {}),
    ({"max_new_tokens": 9}, QWEN, {"top_k": 0, "min_p": 0.1, "max_new_tokens": 4}),
    ({"do_sample": True, "typical_p": 0.8, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "top_h": 0.9}, {}, {}),
    ({"do_sample": True, "renormalize_logits": True, "temperature": 0.5}, {}, {"max_length": 50}),
    ({"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": [[1], [2], [4, 5]]}, LLAMA, {}),
    ({"sequence_bias": {(3,): 1.5, (1, 4): -2.0}, "suppress_tokens": [4, 9]}, QWEN, {"begin_suppress_tokens": [7]}),
    ({"min_length": 9, "eos_token_id": 2}, {}, {"max_new_tokens": 30}),
    ({"min_length": 9, "min_new_tokens": 4}, LLAMA, {}),
    ({"forced_eos_token_id": [5, 6], "max_new_tokens": 1}, LLAMA, {}),
    ({"forced_bos_token_id": 5, "begin_suppress_tokens": [5]}, LLAMA, {}),
    ({"num_beams": 3, "renormalize_logits": True, "num_return_sequences": 2}, LLAMA, {"early_stopping": True}),
    ({"exponential_decay_length_penalty": (0, 1.3), "remove_invalid_values": True}, LLAMA, {"min_new_tokens": 2}),
]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("length", [1, PROMPT])
@pytest.mark.parametrize(("config", "defaults", "kwargs"), CALLS)
def test_equals_transformers(model, config: dict | None, defaults: dict, kwargs: dict, length: int) -> None:
    ids = random_ids(3, length, vocab=10)
    theirs, processors = theirs_of(model, config, defaults, kwargs, ids)
    given = None if config is None else GenerationConfig(**config)
    resolved = resolve(given, GenerationConfig(**defaults), kwargs, length, max_positions=64)
    assert resolved.prompt_length + resolved.max_new_tokens == theirs.max_length
    eos = theirs._eos_token_tensor
    assert list(resolved.eos_token_ids) == ([] if eos is None else eos.tolist())
    pad = theirs._pad_token_tensor
    assert resolved.pad_token_id == (None if pad is None else int(pad))
    assert resolved.do_sample == bool(theirs.do_sample)
    mine = build_processors(resolved)
    names = [type(p).__name__ for p in processors]
    if "MinNewTokensLengthLogitsProcessor" in names and "MinLengthLogitsProcessor" in names:
        names.remove("MinLengthLogitsProcessor")  # the same minimum twice
    aliases = {"MinLengthLogitsProcessor": "MinNewTokensLengthLogitsProcessor"}
    wanted = [aliases.get(n, n) for n in names]
    if resolved.min_new_tokens == 0:
        wanted = [n for n in wanted if n != "MinNewTokensLengthLogitsProcessor"]  # the prompt is long enough already
    assert [type(p).__name__ for p in mine] == wanted
    for extra in (0, 1, 4):
        longer = torch.cat([ids, random_ids(3, extra, vocab=10, seed=9)], dim=1)
        scores = random_scores(3, seed=extra)
        assert_same_scores(mine(longer, scores), processors(longer, scores.clone()))


class Doubles(ours.LogitsProcessor, transformers.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * 2


def test_custom_processors_come_where_transformers_puts_them(model) -> None:
    kwargs = {"do_sample": True, "repetition_penalty": 1.5, "temperature": 0.5, "renormalize_logits": True}
    resolved = resolve(None, None, {**kwargs, "max_new_tokens": 4}, PROMPT)
    own = ours.RepetitionPenaltyLogitsProcessor(3.0)
    mine = build_processors(resolved, [Doubles(), own])
    custom = [Doubles(), transformers.RepetitionPenaltyLogitsProcessor(3.0)]
    _, theirs = theirs_of(model, None, {}, {**kwargs, "max_new_tokens": 4}, random_ids(2, PROMPT), custom)
    assert [type(p).__name__ for p in mine] == [type(p).__name__ for p in theirs]
    assert mine[0] is own
    ids, scores = random_ids(2, PROMPT), random_scores(2)
    assert_same_scores(mine(ids, scores), theirs(ids, scores.clone()))


def test_presence_and_frequency_count_the_answer_only() -> None:
    resolved = resolve(None, None, {"presence_penalty": 1.0, "frequency_penalty": 0.5, "max_new_tokens": 9}, 2)
    processors, scores = build_processors(resolved), torch.zeros(1, 5)
    assert processors(torch.tensor([[1, 1]]), scores).tolist() == [[0, 0, 0, 0, 0]]
    assert processors(torch.tensor([[1, 1, 3, 3, 1]]), scores).tolist() == [[0, -1.5, 0, -2, 0]]


def test_fused_warpers() -> None:
    def fused(**options: object) -> tuple:
        return fused_warpers(resolve(None, None, {"max_new_tokens": 1, **options}, 3))

    assert fused() == (0.0, 0, 1.0, 0.0, ())
    assert fused(temperature=0.5, top_k=9) == (0.0, 0, 1.0, 0.0, ())
    assert fused(do_sample=True) == (1.0, 50, 1.0, 0.0, ())
    assert fused(do_sample=True, temperature=0.5, top_k=0, top_p=0.9, min_p=0.1) == (0.5, 0, 0.9, 0.1, ())
    assert fused(do_sample=True, temperature=0.5, typical_p=0.5) == (1.0, 0, 1.0, 0.0, ("typical_p",))
    assert fused(do_sample=True, output_scores=True) == (1.0, 50, 1.0, 0.0, ())  # nothing to return them in
    names = fused(do_sample=True, output_scores=True, return_dict_in_generate=True, eta_cutoff=0.1, top_h=0.2)[-1]
    assert set(names) == {"output_scores", "eta_cutoff", "top_h"}


BANNED = -math.inf


def test_fused_penalties() -> None:
    def fused(**options: object) -> tuple:
        return fused_penalties(resolve(None, None, {"max_new_tokens": 9, **options}, 3))

    assert fused() == fused(do_sample=True, min_new_tokens=4) == (1.0, 0.0, 0.0, 0, (), ())
    plain = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -1, "min_new_tokens": 4}
    assert fused(eos_token_id=2, **plain) == (1.2, 0.3, -1, 4, (), ())
    assert fused(eos_token_id=2, min_length=8)[3] == 5
    bias = {(4,): 1.5, (5,): 2.5, (6,): -3.0}
    words = [[5], [2], [9]]
    expected = ((4, 1.5), (5, BANNED), (6, BANNED), (9, BANNED), (7, BANNED))
    assert fused(sequence_bias=bias, bad_words_ids=words, suppress_tokens=[7, 6], eos_token_id=2)[4] == expected
    assert (2, BANNED) in fused(bad_words_ids=words)[4]  # no end-of-sequence token
    for name, value in {
        "sequence_bias": {(4, 5): 1.0}, "bad_words_ids": [[5], [2, 3]], "no_repeat_ngram_size": 2,
        "forced_bos_token_id": 1, "forced_eos_token_id": 1, "remove_invalid_values": True, "begin_suppress_tokens": [3],
    }.items():  # fmt: skip
        assert fused(repetition_penalty=1.2, **{name: value}) == (1.0, 0.0, 0.0, 0, (), (name,))
    names = fused(do_sample=True, output_scores=True, output_logits=True, return_dict_in_generate=True, top_h=0.2)[-1]
    assert names == ("output_logits", "output_scores", "top_h")


def test_what_is_fused_is_left_out_of_the_processors() -> None:
    options = {"do_sample": True, "temperature": 0.5, "repetition_penalty": 1.2, "renormalize_logits": True}
    resolved = resolve(None, None, {**options, "max_new_tokens": 1}, 3)
    assert build_processors(resolved, fused=True) == []
    own = Doubles()
    with_own = [type(p).__name__ for p in build_processors(resolved, [own], fused=True)]
    with_prefix = build_processors(resolved, prefix_allowed_tokens_fn=lambda row, ids: [1], fused=True)
    assert with_own == ["RepetitionPenaltyLogitsProcessor", "Doubles"] and len(with_prefix) == 2
    resolved = resolve(None, None, {**options, "typical_p": 0.5, "max_new_tokens": 1}, 3)
    kept = [type(p).__name__ for p in build_processors(resolved, fused=True)]
    assert kept[1:] == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TypicalLogitsWarper"]


NOTICES = [
    ({}, {}, "at most 20 tokens"),
    ({}, {"max_length": 30, "max_new_tokens": 3}, "max_new_tokens=3 wins"),
    ({}, {"max_new_tokens": 3, "min_length": 9, "min_new_tokens": 1}, "min_new_tokens=1 wins"),
    ({}, {"max_new_tokens": 3, "min_new_tokens": 9}, "can't be reached"),
    (
        {},
        {"max_new_tokens": 3, "temperature": 0.5, "top_k": 3},
        "temperature=0.5, top_k=3 has no effect without do_sample",
    ),
    ({}, {"max_new_tokens": 3, "output_scores": True}, "return_dict_in_generate"),
    ({}, {"max_new_tokens": 3, "eos_token_id": [-1, 2]}, "negative id"),
    ({"diversity_penalty": 2.0}, {"max_new_tokens": 3}, "diversity_penalty=2.0 has no effect"),
    ({}, {"max_new_tokens": 3, "length_penalty": 2.0, "early_stopping": True}, "early_stopping=True has no effect"),
]


@pytest.mark.parametrize(("defaults", "kwargs", "text"), NOTICES)
def test_what_is_said(defaults: dict, kwargs: dict, text: str, capsys: pytest.CaptureFixture) -> None:
    resolve(None, GenerationConfig.from_dict(defaults), kwargs, PROMPT)
    said = capsys.readouterr().err
    assert said.count("cuformers:") == 1 and text in said, said


@pytest.mark.parametrize(
    ("defaults", "kwargs"),
    [
        (LLAMA, {"max_new_tokens": 3}),  # the checkpoint's max_length and temperature are no one's mistake
        (QWEN, {"max_new_tokens": 3, "do_sample": False}),
        ({}, {"max_new_tokens": 3, "temperature": 0.0}),  # greedy, as asked
        ({"length_penalty": 2.0}, {"max_new_tokens": 3}),
        ({}, {"max_new_tokens": 3, "num_beams": 2, "length_penalty": 2.0, "early_stopping": "never"}),
        ({}, {"max_new_tokens": 3, "temperature": 1.0, "top_k": 50, "top_p": 1.0}),
    ],
)
def test_what_is_not_worth_saying(defaults: dict, kwargs: dict, capsys: pytest.CaptureFixture) -> None:
    resolve(None, GenerationConfig(**defaults), kwargs, PROMPT)
    assert capsys.readouterr().err == ""


def test_padding_without_a_mask_is_said(capsys: pytest.CaptureFixture) -> None:
    options = {"max_new_tokens": 1, "eos_token_id": 7}
    assert resolve(None, None, options, 3, batch_size=2, has_mask=True).pad_token_id == 7
    assert resolve(None, None, options, 3, batch_size=1, has_mask=False).pad_token_id == 7
    assert capsys.readouterr().err == ""
    resolve(None, None, options, 3, batch_size=2, has_mask=False)
    assert "attention_mask" in capsys.readouterr().err


IMPOSSIBLE = [
    ({"max_length": PROMPT}, "more than the prompt's 6 tokens.*max_new_tokens"),
    ({"do_sample": True, "temperature": 0.0}, "do_sample=False"),
    ({"num_return_sequences": 2}, "do_sample=True"),
    ({"exponential_decay_length_penalty": (1, 1.1)}, "needs it"),
    ({"max_tokens": 3}, "max_new_tokens"),
    ({"num_beams": 2, "do_sample": True}, "num_beams=2.*do_sample=False"),
    ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences=3.*at most num_beams=2"),
    ({"num_beams": 0}, "num_beams=0"),
    ({"num_beams": 2, "early_stopping": "always"}, "early_stopping='always'.*True, False or 'never'"),
    ({"num_beam_groups": 2}, "num_beam_groups=2"),
    ({"assistant_model": object()}, "argument of generate"),
    ({"streamer": object()}, "argument of generate"),
    ({"top_p": 1.5}, "top_p"),
    ({"unknown_option": None}, "unknown_option"),
]


@pytest.mark.parametrize(("kwargs", "text"), IMPOSSIBLE)
def test_impossible_calls_are_refused(kwargs: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve(None, None, kwargs, PROMPT)


def test_the_default_length_stays_within_the_model() -> None:
    assert resolve(None, None, {}, 60, max_positions=64).max_new_tokens == 4
    assert resolve(None, None, {"max_new_tokens": 9}, 60, max_positions=64).max_new_tokens == 9
    with pytest.raises(ValueError, match="64 positions"):
        resolve(None, None, {}, 64, max_positions=64)


def test_a_checkpoints_unsupported_option_is_refused_until_neutralized() -> None:
    defaults = GenerationConfig.from_dict({"num_beam_groups": 4, "eos_token_id": 2})
    with pytest.raises(ValueError, match="num_beam_groups=4"):
        resolve(None, defaults, {"max_new_tokens": 2}, 3)
    assert resolve(None, defaults, {"max_new_tokens": 2, "num_beam_groups": 1}, 3).eos_token_ids == (2,)
    assert resolve(GenerationConfig(num_beam_groups=1, max_new_tokens=2), defaults, {}, 3).max_new_tokens == 2


def test_nothing_the_user_holds_is_changed() -> None:
    config, defaults = GenerationConfig(top_k=3), GenerationConfig(eos_token_id=[2])
    before = config.copy(), defaults.copy()
    resolved = resolve(config, defaults, {"seed": [1, 2], "max_new_tokens": 2}, 3)
    assert (config, defaults) == before
    assert resolved.seed == (1, 2) and hash(resolved)
