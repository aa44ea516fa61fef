"""Stopping criteria give Transformers' answers."""

import time
from functools import cache

import pytest
import torch
import transformers.generation.stopping_criteria as theirs
from hypothesis import given, settings
from hypothesis import strategies as st

from cuformers import generation as ours

from .oracle import random_ids
from .toy_tokenizers import byte_fallback, byte_level


@pytest.mark.parametrize("length", [1, 4, 5, 6])
def test_lengths_and_eos(length: int) -> None:
    ids = random_ids(6, length, vocab=4)
    for name, args in [("MaxLengthCriteria", (5, 100)), ("EosTokenCriteria", (2,)), ("EosTokenCriteria", ([1, 3],))]:
        mine, oracle = getattr(ours, name)(*args), getattr(theirs, name)(*args)
        assert torch.equal(mine(ids, None), oracle(ids, None))
        if name == "EosTokenCriteria":
            for new in (2, 3, 10):
                got, want = (c(ids, None, new_token_length=new) for c in (mine, oracle))
                assert torch.equal(got, want)


def test_time() -> None:
    ids, past = random_ids(2, 3), time.time() - 5
    assert ours.MaxTimeCriteria(4, past)(ids, None).tolist() == [True, True]
    assert ours.MaxTimeCriteria(60, past)(ids, None).tolist() == [False, False]
    assert ours.MaxTimeCriteria(60)(ids, None).tolist() == [False, False]


def test_a_list_joins_its_criteria() -> None:
    criteria = ours.StoppingCriteriaList([ours.EosTokenCriteria(2), ours.MaxLengthCriteria(9)])
    ids = torch.tensor([[1, 2], [2, 1]])
    assert criteria(ids, None).tolist() == [True, False]
    assert criteria.max_length == 9 and ours.StoppingCriteriaList().max_length is None


STOPS = ["stop", "st", " cat.", "p!", "\n\n", "你好", "</s>", "'t it"]


@cache
def criteria() -> list[tuple]:
    return [
        (t, ours.StopStringCriteria(t, stops), theirs.StopStringCriteria(t, stops))
        for t in (byte_level(), byte_fallback())
        for stops in (STOPS[0], STOPS[:3], STOPS[3:])
    ]


@given(st.lists(st.sampled_from(["stop", " stopper", " the cat", ".", "!", "\n", "你", "好", " isn't", " it?", "s"])))
@settings(max_examples=60, deadline=None)
def test_stop_strings(words: list[str]) -> None:
    for tokenizer, mine, oracle in criteria():
        ids = [*tokenizer("".join(["Once", *words])).input_ids, tokenizer.eos_token_id]
        for end in range(1, len(ids) + 1):
            row = torch.tensor([ids[:end]])
            assert mine(row, None).tolist() == oracle(row, None).tolist(), (ids[:end], mine.stop_strings)


def test_stop_strings_by_row() -> None:
    tokenizer = byte_level()
    rows = [tokenizer(t).input_ids[-2:] for t in ("a stop", "a cat")]
    got = ours.StopStringCriteria(tokenizer, "op")(torch.tensor(rows), None)
    assert got.tolist() == [True, False]
    with pytest.raises(ValueError, match="empty"):
        ours.StopStringCriteria(tokenizer, "")
