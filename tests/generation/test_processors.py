"""Every processor and warper gives Transformers' scores; ragged rows give what each row gives alone."""

import math

import pytest
import torch
import transformers.generation.logits_process as theirs

from cuformers import generation as ours
from cuformers.generation import Rows

from .oracle import VOCAB, assert_same_scores, random_ids, random_scores

INF = math.inf
WARPERS = [
    ("TemperatureLogitsWarper", {"temperature": 0.7}),
    ("TemperatureLogitsWarper", {"temperature": 2.5}),
    ("TopKLogitsWarper", {"top_k": 1}),
    ("TopKLogitsWarper", {"top_k": 7}),
    ("TopKLogitsWarper", {"top_k": 10 * VOCAB}),
    ("TopKLogitsWarper", {"top_k": 2, "min_tokens_to_keep": 5, "filter_value": -5.0}),
    ("TopPLogitsWarper", {"top_p": 0.0}),
    ("TopPLogitsWarper", {"top_p": 0.3}),
    ("TopPLogitsWarper", {"top_p": 0.95}),
    ("TopPLogitsWarper", {"top_p": 1.0}),
    ("TopPLogitsWarper", {"top_p": 0.1, "min_tokens_to_keep": 4, "filter_value": -9.0}),
    ("MinPLogitsWarper", {"min_p": 0.0}),
    ("MinPLogitsWarper", {"min_p": 0.05}),
    ("MinPLogitsWarper", {"min_p": 1.0}),
    ("MinPLogitsWarper", {"min_p": 0.9, "min_tokens_to_keep": 3}),
    ("TypicalLogitsWarper", {"mass": 0.2}),
    ("TypicalLogitsWarper", {"mass": 0.9}),
    ("TypicalLogitsWarper", {"mass": 0.05, "min_tokens_to_keep": 6}),
    ("EpsilonLogitsWarper", {"epsilon": 0.01}),
    ("EpsilonLogitsWarper", {"epsilon": 0.99, "min_tokens_to_keep": 2}),
    ("EtaLogitsWarper", {"epsilon": 0.002}),
    ("EtaLogitsWarper", {"epsilon": 0.5, "min_tokens_to_keep": 3}),
    ("TopHLogitsWarper", {"top_h": 0.3}),
    ("TopHLogitsWarper", {"top_h": 0.8}),
    ("LogitNormalization", {}),
    ("InfNanRemoveLogitsProcessor", {}),
]
BIAS = {(3,): 2.5, (5, 6): -1.5, (7, 8, 9): 4.0, (1, 6): 0.25, (8, 9): -INF, (2, 2, 2, 2, 4): 7.0, (6,): -INF}
HISTORY = [
    ("RepetitionPenaltyLogitsProcessor", {"penalty": 1.3}),
    ("RepetitionPenaltyLogitsProcessor", {"penalty": 0.5}),
    ("RepetitionPenaltyLogitsProcessor", {"penalty": 1.3, "prompt_ignore_length": 4}),
    ("NoRepeatNGramLogitsProcessor", {"ngram_size": 1}),
    ("NoRepeatNGramLogitsProcessor", {"ngram_size": 2}),
    ("NoRepeatNGramLogitsProcessor", {"ngram_size": 3}),
    ("SequenceBiasLogitsProcessor", {"sequence_bias": BIAS}),
    ("SequenceBiasLogitsProcessor", {"sequence_bias": [[[5, 6], -1.5], [[4], 3.0]]}),
    ("NoBadWordsLogitsProcessor", {"bad_words_ids": [[4], [5, 6], [1, 2, 3], [9]], "eos_token_id": [9, 10]}),
    ("NoBadWordsLogitsProcessor", {"bad_words_ids": [[2, 7]]}),
    ("SuppressTokensLogitsProcessor", {"suppress_tokens": [1, 4, 49]}),
    ("SuppressTokensAtBeginLogitsProcessor", {"begin_suppress_tokens": [1, 4], "begin_index": 6}),
    ("MinLengthLogitsProcessor", {"min_length": 6, "eos_token_id": 2}),
    ("MinLengthLogitsProcessor", {"min_length": 7, "eos_token_id": [2, 30]}),
    ("MinNewTokensLengthLogitsProcessor", {"prompt_length_to_skip": 3, "min_new_tokens": 4, "eos_token_id": [2, 9]}),
    ("MinNewTokensLengthLogitsProcessor", {"prompt_length_to_skip": 3, "min_new_tokens": 3, "eos_token_id": 2}),
    ("ForcedBOSTokenLogitsProcessor", {"bos_token_id": 5}),
    ("ForcedEOSTokenLogitsProcessor", {"max_length": 7, "eos_token_id": [5, 8]}),
    ("ForcedEOSTokenLogitsProcessor", {"max_length": 8, "eos_token_id": 5}),
    ("ExponentialDecayLengthPenalty",
     {"exponential_decay_length_penalty": (2, 1.2), "eos_token_id": [2, 9], "input_ids_seq_length": 2}),
    ("ExponentialDecayLengthPenalty",
     {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 2, "input_ids_seq_length": 2}),
]  # fmt: skip


def both(name: str, options: dict) -> tuple:
    return getattr(ours, name)(**options), getattr(theirs, name)(**options)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("name", "options"), WARPERS)
def test_warpers(name: str, options: dict, rows: int) -> None:
    mine, oracle = both(name, options)
    for seed in range(4):
        scores = random_scores(rows, seed=seed, spread=1.0 + 2 * seed)
        before = scores.clone()
        assert_same_scores(mine(None, scores), oracle(None, scores.clone()))
        assert torch.equal(scores, before), "the input must stay as it is"


@pytest.mark.parametrize(("name", "options"), WARPERS)
def test_warpers_with_removed_tokens_and_ties(name: str, options: dict) -> None:
    mine, oracle = both(name, options)
    scores = random_scores(3).round()
    scores[:, ::3] = -INF
    if name == "TopHLogitsWarper":  # the oracle's entropy is nan there; tokens of no probability stay removed
        kept = mine(None, scores).isfinite()
        assert (kept <= scores.isfinite()).all() and kept.any(-1).all()
    elif name == "TypicalLogitsWarper" or (name == "TopPLogitsWarper" and 0 < options["top_p"] < 1):
        # Which of equal tokens goes is up to an unstable sort: the kept values are the same.
        ordered = [w(None, scores).sort(-1).values for w in (mine, oracle)]
        assert_same_scores(*ordered)
    else:
        assert_same_scores(mine(None, scores), oracle(None, scores))


def test_inf_nan_remove() -> None:
    mine, oracle = both("InfNanRemoveLogitsProcessor", {})
    scores = torch.tensor([[1.0, math.nan, INF, -INF], [0.0, -2.0, math.nan, 3.0]])
    assert torch.equal(mine(None, scores), oracle(None, scores))
    assert mine(None, scores).isfinite().all()


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 6, 40])
@pytest.mark.parametrize(("name", "options"), HISTORY)
def test_history_processors(name: str, options: dict, length: int, rows: int) -> None:
    mine, oracle = both(name, options)
    for seed in range(3):
        ids = random_ids(rows, length, vocab=10, seed=seed)  # few distinct tokens, so that sequences repeat
        scores = random_scores(rows, seed=seed)
        assert_same_scores(mine(ids, scores), oracle(ids, scores.clone()))


@pytest.mark.parametrize(("name", "options"), HISTORY)
def test_left_padded_rows(name: str, options: dict) -> None:
    mine, oracle = both(name, options)
    ids = random_ids(3, 12, vocab=10)
    ids[0, :7] = 0
    ids[1, :11] = 0
    scores = random_scores(3)
    assert_same_scores(mine(ids, scores), oracle(ids, scores.clone()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("name", "options"), HISTORY)
def test_ragged_rows_are_independent(name: str, options: dict, dtype: torch.dtype) -> None:
    mine, oracle = both(name, options)
    lengths = [1, 2, 5, 6, 7, 12]
    ids, scores = random_ids(len(lengths), 12, vocab=10), random_scores(len(lengths))
    rows = Rows(ids.to(dtype), lengths=torch.tensor(lengths, dtype=dtype))
    together = mine.process(rows, scores)
    for i, n in enumerate(lengths):
        assert_same_scores(together[i : i + 1], oracle(ids[i : i + 1, :n], scores[i : i + 1].clone()))


def test_ragged_rows_with_their_own_prompts() -> None:
    prompts, lengths = torch.tensor([1, 3, 5]), torch.tensor([5, 5, 5])
    rows, scores = Rows(random_ids(3, 8), lengths, prompts), random_scores(3)
    least = ours.MinNewTokensLengthLogitsProcessor(99, 3, 2).process(rows, scores)
    assert least[:, 2].isinf().tolist() == [False, True, True]
    first = ours.SuppressTokensAtBeginLogitsProcessor([4], 99).process(rows, scores)
    assert first[:, 4].isinf().tolist() == [False, False, True]
    last = ours.ForcedEOSTokenLogitsProcessor(99, 7, max_new_tokens=3).process(rows, scores)
    assert last[:, 6].isinf().tolist() == [False, True, False]
    decay = ours.ExponentialDecayLengthPenalty((1, 1.5), 2, 99).process(rows, scores)
    for i, past in enumerate([3, 1, -1]):
        want = scores[i, 2] + scores[i, 2].abs() * (1.5 ** max(past, 0) - 1)
        torch.testing.assert_close(decay[i, 2], want)


def naive_counts(ids: list[int], start: int) -> torch.Tensor:
    counts = torch.zeros(VOCAB)
    for token in ids[start:]:
        counts[token] += 1
    return counts


@pytest.mark.parametrize("penalty", [0.6, -1.5])
def test_presence_and_frequency_count_generated_tokens(penalty: float) -> None:
    ids, scores = random_ids(3, 20, vocab=6), random_scores(3)
    frequency = ours.FrequencyPenaltyLogitsProcessor(penalty, prompt_length=8)(ids, scores)
    presence = ours.PresencePenaltyLogitsProcessor(penalty, prompt_length=8)(ids, scores)
    for i in range(3):
        counts = naive_counts(ids[i].tolist(), 8)
        torch.testing.assert_close(frequency[i], scores[i] - penalty * counts)
        torch.testing.assert_close(presence[i], scores[i] - penalty * (counts > 0))
    lengths, prompts = torch.tensor([20, 9, 8]), torch.tensor([8, 2, 8])
    ragged = ours.FrequencyPenaltyLogitsProcessor(penalty).process(Rows(ids, lengths, prompts), scores)
    for i, (n, p) in enumerate(zip(lengths.tolist(), prompts.tolist())):
        torch.testing.assert_close(ragged[i], scores[i] - penalty * naive_counts(ids[i, :n].tolist(), p))


def test_prefix_constrained() -> None:
    def allowed(row: int, tokens: torch.Tensor) -> list[int]:
        return [row, int(tokens[-1]), 7]

    ids, scores = random_ids(4, 5), random_scores(4)
    mine = ours.PrefixConstrainedLogitsProcessor(allowed, 1)(ids, scores)
    assert_same_scores(mine, theirs.PrefixConstrainedLogitsProcessor(allowed, 1)(ids, scores))
    with pytest.raises(ValueError, match="row 0"):
        ours.PrefixConstrainedLogitsProcessor(lambda row, tokens: [], 1)(ids, scores)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("TemperatureLogitsWarper", {"temperature": 0.0}),
        ("TopKLogitsWarper", {"top_k": 0}),
        ("TopKLogitsWarper", {"top_k": 1.5}),
        ("TopPLogitsWarper", {"top_p": 1.5}),
        ("MinPLogitsWarper", {"min_p": -0.1}),
        ("MinPLogitsWarper", {"min_p": 0.1, "min_tokens_to_keep": 0}),
        ("TypicalLogitsWarper", {"mass": 1.0}),
        ("EpsilonLogitsWarper", {"epsilon": 0.0}),
        ("EtaLogitsWarper", {"epsilon": 1.0}),
        ("TopHLogitsWarper", {"top_h": 0.0}),
        ("RepetitionPenaltyLogitsProcessor", {"penalty": 0.0}),
        ("NoRepeatNGramLogitsProcessor", {"ngram_size": 0}),
        ("SequenceBiasLogitsProcessor", {"sequence_bias": {}}),
        ("SequenceBiasLogitsProcessor", {"sequence_bias": {(-1,): 1.0}}),
        ("SequenceBiasLogitsProcessor", {"sequence_bias": {(1,): math.nan}}),
        ("NoBadWordsLogitsProcessor", {"bad_words_ids": [[]]}),
        ("MinLengthLogitsProcessor", {"min_length": -1, "eos_token_id": 1}),
    ],
)
def test_bad_parameters_are_refused(name: str, options: dict) -> None:
    with pytest.raises(ValueError, match="allowed is"):
        getattr(ours, name)(**options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SequenceBiasLogitsProcessor", {"sequence_bias": {(1, VOCAB): 1.0}}),
        ("NoBadWordsLogitsProcessor", {"bad_words_ids": [[VOCAB]]}),
        ("SuppressTokensLogitsProcessor", {"suppress_tokens": [VOCAB]}),
        ("ForcedBOSTokenLogitsProcessor", {"bos_token_id": VOCAB}),
        ("ForcedEOSTokenLogitsProcessor", {"max_length": 2, "eos_token_id": VOCAB}),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(name: str, options: dict) -> None:
    with pytest.raises(ValueError, match=f"from 0 to {VOCAB - 1}"):
        getattr(ours, name)(**options)(random_ids(2, 1), random_scores(2))


def test_one_processor_serves_two_vocabularies() -> None:
    suppress = ours.SuppressTokensLogitsProcessor([3])
    for vocab in (5, 9, 5):
        assert suppress(random_ids(1, 1), torch.zeros(1, vocab)).isinf().nonzero().tolist() == [[0, 3]]


class Adds(ours.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, amount: float, times: int = 1) -> torch.Tensor:
        return scores + amount * times


def test_list_hands_on_what_a_processor_asks_for() -> None:
    processors = ours.LogitsProcessorList([ours.TopKLogitsWarper(3), Adds()])
    ids, scores = random_ids(2, 3), random_scores(2)
    got = processors(ids, scores, amount=2.0, unused=1)
    torch.testing.assert_close(got, ours.TopKLogitsWarper(3)(ids, scores) + 2.0)
    with pytest.raises(ValueError, match="amount"):
        processors(ids, scores)


def test_list_refuses_ragged_rows_for_a_rectangular_processor() -> None:
    processors = ours.LogitsProcessorList([Adds()])
    with pytest.raises(ValueError, match="RowProcessor"):
        processors.process(Rows(random_ids(2, 3), torch.tensor([1, 3])), random_scores(2))
