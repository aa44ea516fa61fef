"""generate with num_beams gives transformers' answers: on every family, padded, with ends, processors and criteria."""

import copy

import pytest
import torch
import transformers
from models.checkpoints import ALONE, oracle, shared, tokens
from models.families import FAMILIES
from torch import Tensor

from cuformers.engine.runner import Runner

NAME = "llama"
PAD = 5
"""Not 0, which transformers' beam search takes for no pad token at all."""
WITHOUT_CACHE = ("phi3-longrope",)


def run(model, ids: Tensor, **options):
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD, "num_beams": 3, **options}
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **options})


def theirs(name: str, ids: Tensor, **options):
    model = copy.deepcopy(oracle(name)) if name in ALONE else oracle(name)  # rotations of earlier calls stay behind
    return run(model, ids, use_cache=name not in WITHOUT_CACHE, **options)


def padded(*lengths: int) -> dict:
    width = max(lengths)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return {"ids": tokens(len(lengths), width, seed=3) * mask, "attention_mask": mask}


@pytest.fixture(scope="module")
def ends() -> list[int]:
    """Tokens that occur in the middle of the answers to tokens(3, 6)."""
    free = run(shared(NAME), tokens(3, 6), eos_token_id=None, num_return_sequences=3)[:, 6:]
    return [int(free[0, 5]), int(free[4, 9])]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str) -> None:
    lengths = (21,) if name in ALONE else (1, 7, 20)
    ours = run(shared(name), **padded(*lengths), num_return_sequences=2, eos_token_id=[2, 40, 90])
    assert torch.equal(ours, theirs(name, **padded(*lengths), num_return_sequences=2, eos_token_id=[2, 40, 90]))
    assert len(ours) == 2 * len(lengths)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_prompts_longer_than_pages_and_than_the_model(name: str) -> None:
    """The beams' last pages fill up on the way: 60 to 76, and 124 to 140 tokens."""
    for length in (60, 124):
        ids = tokens(2, length, seed=length)
        assert torch.equal(run(shared(name), ids, eos_token_id=None), theirs(name, ids, eos_token_id=None))


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("beams", [2, 5])
def test_ends_penalties_and_ways_to_stop(ends: list[int], beams: int, penalty: float, early: bool | str) -> None:
    options = {
        "num_beams": beams, "num_return_sequences": beams, "length_penalty": penalty, "early_stopping": early,
        "eos_token_id": ends, "return_dict_in_generate": True, "output_scores": True,
    }  # fmt: skip
    ours, expected = run(shared(NAME), tokens(3, 6), **options), theirs(NAME, tokens(3, 6), **options)
    assert torch.equal(ours.sequences, expected.sequences)
    assert torch.equal(ours.beam_indices, expected.beam_indices.long())
    torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)
    assert penalty > 1 or (ours.sequences[:, -1] == PAD).any(), "no answer ends early"


@pytest.mark.parametrize("options", [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 9},
    {"bad_words_ids": [[5], [17, 30]], "suppress_tokens": [8, 9]},
    {"sequence_bias": {(12,): 4.0, (40, 41): -3.0}, "begin_suppress_tokens": [7]},
    {"forced_eos_token_id": 3},
    {"repetition_penalty": 0.7, "renormalize_logits": True},
    {"max_length": 15, "max_new_tokens": None, "min_length": 12},
    {"exponential_decay_length_penalty": (3, 1.5)},
    {"num_beams": 12, "eos_token_id": [3, 9]},
    {"num_beams": 20},
])  # fmt: skip
def test_options_give_transformers_answers(ends: list[int], options: dict) -> None:
    options = {"eos_token_id": ends, "num_return_sequences": 2, **options}
    given = padded(6, 2, 4)
    assert torch.equal(run(shared(NAME), **given, **options), theirs(NAME, **given, **options))


def test_scores_logits_and_logprobs(ends: list[int]) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": ends}
    ids = tokens(1, 6)
    options |= {"repetition_penalty": 1.3, "num_return_sequences": 3}
    ours = run(shared(NAME), ids, output_logprobs=True, **options)
    expected = theirs(NAME, ids, **options)
    assert torch.equal(ours.sequences, expected.sequences)
    assert set(expected) - set(ours) == {"past_key_values"} and set(ours) - set(expected) == {"logprobs"}
    assert list(ours)[:5] == list(expected)[:5]
    for kind in ("scores", "logits"):
        mine, other = (torch.stack(out[kind]) for out in (ours, expected))
        assert mine.dtype is torch.float32 and mine.shape[1] == 3
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-4)
    raw = oracle(NAME)(ours.sequences).logits.log_softmax(-1)[:, 5:-1]
    chosen = raw.gather(2, ours.sequences[:, 6:, None])[..., 0].masked_fill(ours.beam_indices < 0, 0)
    torch.testing.assert_close(ours.logprobs, chosen, rtol=1e-5, atol=1e-4)
    parts = oracle(NAME).compute_transition_scores(ours.sequences, ours.scores, ours.beam_indices)
    lengths = (ours.beam_indices >= 0).sum(1)
    torch.testing.assert_close(parts.sum(1) / lengths, ours.sequences_scores, rtol=1e-5, atol=1e-5)


def test_rows_whose_search_has_ended_have_zeros_for_scores(ends: list[int]) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": ends, "early_stopping": True}
    ours, expected = run(shared(NAME), tokens(3, 6), **options), theirs(NAME, tokens(3, 6), **options)
    assert torch.equal(ours.sequences, expected.sequences) and len(ours.scores) == len(expected.scores)
    mine, other = torch.stack(ours.scores).unflatten(1, (3, 3)), torch.stack(expected.scores).unflatten(1, (3, 3))
    ended = (mine == 0).all(-1).all(-1)
    assert ended.any() and not ended[0].any() and not ended[-1].all()
    torch.testing.assert_close(mine[~ended], other[~ended], rtol=1e-5, atol=1e-4)


def test_the_outputs_are_those_that_were_asked_for() -> None:
    out = run(shared(NAME), tokens(1, 6), return_dict_in_generate=True)
    assert out.keys() == ("sequences", "beam_indices")
    assert torch.equal(out.sequences, run(shared(NAME), tokens(1, 6)))


def test_pad_token_0_is_a_pad_token(ends: list[int]) -> None:
    options = {"eos_token_id": ends, "num_return_sequences": 3}
    ours = run(shared(NAME), tokens(3, 6), pad_token_id=0, **options)
    other = run(shared(NAME), tokens(3, 6), **options)
    filled = (ours[:, 6:] != other[:, 6:]).nonzero()
    assert len(filled) and (ours[:, 6:][tuple(filled.T)] == 0).all() and (other[:, 6:][tuple(filled.T)] == PAD).all()


class Avoid(transformers.LogitsProcessor):
    """Bans the last token from coming again; keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids.clone())
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


def test_a_processor_of_the_user_sees_what_transformers_shows_it() -> None:
    ours, other = Avoid(), Avoid()
    options = {**padded(2, 6, 4), "eos_token_id": None, "pad_token_id": 0}
    a = run(shared(NAME), logits_processor=[ours], **options)
    b = theirs(NAME, logits_processor=transformers.LogitsProcessorList([other]), **options)
    assert torch.equal(a, b)
    assert all(torch.equal(x, y) for x, y in zip(ours.seen, other.seen, strict=True))


class Sum(transformers.StoppingCriteria):
    """Ends a row whose tokens sum up to a multiple of seven."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        return input_ids.sum(1) % 7 == 0


def test_a_criterion_of_the_user_ends_answers() -> None:
    options = {"stopping_criteria": transformers.StoppingCriteriaList([Sum()]), "eos_token_id": 1}
    ours = run(shared(NAME), tokens(5, 6), num_return_sequences=3, **options)
    assert torch.equal(ours, theirs(NAME, tokens(5, 6), num_return_sequences=3, **options))
    assert (ours[:, -1] == PAD).any(), "the criterion never acted"


def test_a_criterion_that_ends_everything() -> None:
    ours = run(shared(NAME), tokens(2, 6), max_time=1e-9, num_return_sequences=3)
    assert torch.equal(ours, theirs(NAME, tokens(2, 6), max_time=1e-9, num_return_sequences=3)) and ours.shape == (6, 7)


@pytest.mark.parametrize("width", [5, 1])
def test_prefix_allowed_tokens(width: int) -> None:
    """With one token allowed, beams beside the best have nothing to say."""

    def allowed(row: int, ids: Tensor) -> list[int]:
        return [(int(ids[-1]) * 3 + row + j) % 125 + 3 for j in range(width)]

    options = {"prefix_allowed_tokens_fn": allowed, "eos_token_id": None}
    assert torch.equal(run(shared(NAME), tokens(3, 6), **options), theirs(NAME, tokens(3, 6), **options))


def test_a_beam_costs_no_more_than_its_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """90 to 106 tokens: their first page is computed once, for the first of three beams."""
    model, computed = shared(NAME), []
    step = Runner.step
    monkeypatch.setattr(Runner, "step", lambda self, chunks, *args: (
        computed.append(sum(c.count for c in chunks)), step(self, chunks, *args))[1])  # fmt: skip
    run(model, tokens(1, 90), eos_token_id=None)
    assert computed == [90 + 26 + 26, *(3 * (26 + i) for i in range(1, 16))]


def test_weights_that_changed_are_seen() -> None:
    ids, model = tokens(1, 70), copy.deepcopy(shared(NAME))
    before = run(model, ids)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    other = copy.deepcopy(oracle(NAME))
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(model, ids), run(other, ids)) and not torch.equal(run(model, ids), before)


@pytest.mark.parametrize("options, says", [
    ({"streamer": object()}, "streamer.*num_beams=1"),
    ({"do_sample": True}, "num_beams=3.*do_sample=False"),
    ({"num_return_sequences": 4}, "num_return_sequences=4.*num_beams=3"),
    ({"early_stopping": "always"}, "early_stopping='always'"),
    ({"num_beams": 2.5}, "num_beams=2.5"),
])  # fmt: skip
def test_what_is_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(shared(NAME), tokens(1, 4), **options)
