"""Padding, truncation, pairs and tensors of a tokenizer call: equal to Transformers', or refused with the remedy."""

import itertools
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer as Theirs

from cuformers.auto.tokenizers.batch_encoding import BatchEncoding
from cuformers.auto.tokenizers.tokenizer import AutoTokenizer

TEXTS = ["Once upon a time there was a little girl", "Lily", "", "she loved her red ball very much, 123", "漢字"]
WORDS = [["Once", "upon", "a"], ["time"], ["a", "red ball"]]
GRID = {
    "padding": [False, True, "max_length", "longest", "do_not_pad"],
    "truncation": [None, True, False, "only_first", "only_second", "do_not_truncate"],
    "max_length": [None, 6, 16],
    "padding_side": [None, "left"],
    "pad_to_multiple_of": [None, 8],
    "return_tensors": [None, "pt", "np"],
    "return_overflowing_tokens": [False, True],
    "stride": [0, 1],
    "add_special_tokens": [True, False],
}
INPUTS = [
    ((TEXTS[0],), {}),
    ((TEXTS[0], "the pair is longer than the first"), {}),
    ((TEXTS[0], ""), {}),
    ((TEXTS,), {}),
    ((TEXTS, TEXTS[::-1]), {}),
    (([("a b", "c d e"), ("f", "g h")],), {}),
    ((WORDS,), {"is_split_into_words": True}),
    ((WORDS[0],), {"is_split_into_words": True}),
    ((WORDS, WORDS[::-1]), {"is_split_into_words": True}),
]


def plain(value):
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value), str(value.dtype), value.tolist()
    return value


def outcome(tokenizer, arguments, options):
    try:
        return {name: plain(value) for name, value in tokenizer(*arguments, **options).items()}
    except BaseException as error:  # the Rust library's panics are BaseException
        return error


@pytest.mark.parametrize("name", ["generic", "bert"])
def test_options_equal_to_transformers(folders, name, capfd):
    theirs, ours = (
        load(folders[name], model_max_length=20) for load in (Theirs.from_pretrained, AutoTokenizer.from_pretrained)
    )
    for tokenizer in (theirs, ours):
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    warnings.simplefilter("ignore")
    rng, compared = random.Random(0), 0
    for values in rng.sample(list(itertools.product(*GRID.values())), 80):
        options = dict(zip(GRID, values)) | {"return_special_tokens_mask": True, "return_length": True}
        for arguments, more in INPUTS:
            expected = outcome(theirs, arguments, options | more)
            got = outcome(ours, arguments, options | more)
            if isinstance(got, BaseException):
                assert isinstance(got, ValueError), (arguments, options, got)
                ragged = "can't become a tensor" in str(got)  # numpy arrays of objects are refused, too
                assert ragged or isinstance(expected, BaseException), (arguments, options, got)
            else:
                assert got == expected, (arguments, options)
                compared += 1
    assert compared > 300


def test_places_equal_to_transformers(folders):
    for name in ("generic", "bert", "stories"):
        theirs = Theirs.from_pretrained(str(folders[name]))(TEXTS[0], TEXTS[3])
        ours = AutoTokenizer.from_pretrained(folders[name])(TEXTS[0], TEXTS[3])
        assert ours.tokens() == theirs.tokens()
        assert ours.word_ids() == theirs.word_ids()
        assert ours.sequence_ids() == theirs.sequence_ids()
        assert ours.n_sequences == theirs.n_sequences == 2
        for i in range(1, len(ours.input_ids) - 1):
            assert ours.token_to_chars(i) == theirs.token_to_chars(i)
            assert ours.token_to_sequence(0, i) == theirs.token_to_sequence(0, i)
            assert ours.token_to_word(-i) == theirs.token_to_word(len(ours.input_ids) - i)
        for i in range(9):
            assert ours.char_to_token(i) == theirs.char_to_token(i)
            assert ours.char_to_token(0, i, 1) == theirs.char_to_token(0, i, sequence_index=1)
            assert ours.char_to_word(i) == theirs.char_to_word(i)
        assert ours.word_to_tokens(0) == theirs.word_to_tokens(0)
        assert ours.word_to_chars(0) == theirs.word_to_chars(0)


def test_batch_encoding_is_a_dict_that_moves(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["stories"])
    encoded = tokenizer(["a girl", "a boy"], return_tensors="pt", max_length=3)
    assert encoded.input_ids is encoded["input_ids"]
    assert {**encoded}.keys() == {"input_ids", "attention_mask"}
    assert encoded.input_ids.dtype == torch.int64
    assert encoded.input_ids.shape == (2, 3)
    assert encoded[0].ids == encoded.input_ids[0].tolist()
    moved = encoded.to("meta")
    assert moved is encoded
    assert moved.input_ids.device.type == "meta"
    with pytest.raises(ValueError, match="dtype"):
        encoded.to(torch.float16)
    with pytest.raises(ValueError, match="return_tensors='pt'"):
        BatchEncoding({"input_ids": [1]}).to("cpu")
    with pytest.raises(ValueError, match="'pt' or 'np'"):
        BatchEncoding({"input_ids": [1]}, tensor_type="jax")
    with pytest.raises(AttributeError, match="pixel_values"):
        _ = encoded.pixel_values


def test_pad_equal_to_transformers(folders):
    theirs, ours = (load(folders["bert"]) for load in (Theirs.from_pretrained, AutoTokenizer.from_pretrained))
    rows = [dict(theirs(text)) for text in TEXTS]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for inputs in (rows, columns, rows[0], [{"input_ids": [5, 6]}, {"input_ids": [7]}]):
        for options in (
            {},
            {"padding": "max_length", "max_length": 30},
            {"pad_to_multiple_of": 8, "padding_side": "left"},
        ):
            copies = [[dict(row) for row in inputs] if isinstance(inputs, list) else dict(inputs) for _ in range(2)]
            assert dict(ours.pad(copies[0], **options)) == dict(theirs.pad(copies[1], **options))
    assert torch.equal(
        ours.pad([{"input_ids": [5, 6]}, {"input_ids": torch.tensor([7])}], return_tensors="pt")["input_ids"],
        torch.tensor([[5, 6], [7, ours.pad_token_id]]),
    )


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((["a", "b c"],), {"padding": True}, "pad_token = tokenizer.eos_token"),
        (("a",), {"padding": "max_length"}, "needs max_length="),
        (("a",), {"padding": "most"}, "padding='most'"),
        (("a",), {"truncation": "first"}, "truncation='first'"),
        (("a",), {"max_length": -1}, "max_length=-1"),
        (("a",), {"padding_side": "top", "padding": True}, "pad"),
        (("a",), {"return_tensors": "tf"}, "'pt' or 'np'"),
        ((["a", "b c"],), {"return_tensors": "pt"}, "padding=True"),
        ((["a", 3],), {}, r"text\[1\] is int"),
        ((None,), {}, "text is NoneType"),
        (("a \ud800",), {}, "lone surrogate"),
        ((["a", "b"], ["c"]), {}, "text_pair must be a list of 2"),
        (("a b c d", "e"), {"truncation": "only_second", "max_length": 2}, "longest_first"),
        (("a b c d",), {"truncation": True, "max_length": 3, "stride": 3}, "stride=3"),
        (("a b",), {"pad_to_multiple_of": 0, "padding": True}, "pad_to_multiple_of=0"),
    ],
)
def test_what_is_impossible_is_refused(folders, arguments, options, message):
    tokenizer = AutoTokenizer.from_pretrained(folders["generic"], model_max_length=int(1e30))
    with pytest.raises(ValueError, match=message):
        tokenizer(*arguments, **options)


def test_special_tokens_leave_no_room(folders):
    with pytest.raises(ValueError, match=r"max_length=1 .* 2 special tokens"):
        AutoTokenizer.from_pretrained(folders["bert"])("a", max_length=1)


def test_unknown_options_raise(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["generic"])
    with pytest.raises(TypeError, match="paddding"):
        tokenizer("a", paddding=True)
    with pytest.raises(ValueError, match="from_pretrained='paddding_side'"):
        AutoTokenizer.from_pretrained(folders["generic"], paddding_side="left")
    with pytest.raises(ValueError, match="use_fast"):
        AutoTokenizer.from_pretrained(folders["generic"], use_fast=False)
    with pytest.raises(ValueError, match="LlamaTokenizer's option"):
        AutoTokenizer.from_pretrained(folders["generic"], legacy=True)
    with pytest.raises(ValueError, match="padding_side='middle'"):
        AutoTokenizer.from_pretrained(folders["generic"], padding_side="middle")


def test_decode_takes_every_kind_of_ids(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["stories"])
    ids = tokenizer("a little girl").input_ids
    for kind in (ids, tuple(ids), np.array(ids), torch.tensor(ids), [torch.tensor(i) for i in ids]):
        assert tokenizer.decode(kind, skip_special_tokens=True) == "a little girl"
    assert tokenizer.decode(ids[1]) == "a"
    assert tokenizer.decode([]) == ""
    for batch in ([ids, ids[:2]], torch.tensor([ids, ids]), np.array([ids])):
        texts = [tokenizer.decode(row) for row in batch]
        assert tokenizer.batch_decode(batch) == tokenizer.decode(batch) == texts
    assert tokenizer.batch_decode([torch.tensor(ids)]) == [tokenizer.decode(ids)]
    assert tokenizer.batch_decode([]) == []
    with pytest.raises(ValueError, match="-100"):
        tokenizer.decode([1, -100])


def test_threads_may_share_a_tokenizer(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["generic"])
    tokenizer.pad_token = tokenizer.eos_token
    text = "Once upon a time there was a little girl. " * 20
    whole, failures = tokenizer(text).input_ids, []

    def work(cut: int) -> None:
        try:
            for _ in range(30):
                assert tokenizer([text, "a"], padding=True, truncation=True, max_length=cut).input_ids[0] == whole[:cut]
                assert tokenizer(text).input_ids == whole
                assert tokenizer.decode(whole) == text
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(5 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
