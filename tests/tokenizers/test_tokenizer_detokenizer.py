# ruff: noqa: RUF001
"""Decoding id by id adds up to decoding all ids at once, for every kind of decoder and any ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_folders import NAMES, write_folder
from tokenizers import Tokenizer, decoders, models

from cuformers.auto.tokenizers.detokenizer import IncrementalDecoder
from cuformers.auto.tokenizers.tokenizer import AutoTokenizer


def pieces(tokenizer, ids, sizes=(1,), **options) -> list[str]:
    decoder, texts, at = IncrementalDecoder(tokenizer, **options), [], 0
    while at < len(ids):
        size = sizes[len(texts) % len(sizes)]
        texts.append(decoder.push(ids[at : at + size]))
        at += size
    return [*texts, decoder.finish()]


def short_tokens(tokenizer) -> list[int]:
    """Tokens of one byte or character, and byte tokens: those that meet inside a character."""
    vocabulary = tokenizer.get_vocab().items()
    return [i for token, i in vocabulary if len(token) == 1 or token.startswith(("<0x", "##"))]


def ids_of(tokenizer) -> st.SearchStrategy[list[int]]:
    anything = st.integers(0, len(tokenizer) + 2)
    short = st.sampled_from(short_tokens(tokenizer))
    special = st.sampled_from(tokenizer.all_special_ids or [0])
    return st.one_of(st.lists(anything), st.lists(short), st.lists(st.one_of(short, special, anything)))


@pytest.mark.parametrize("name", NAMES)
def test_pieces_add_up(folders, name):
    tokenizer = AutoTokenizer.from_pretrained(folders[name])

    @settings(max_examples=40, deadline=None, database=None)
    @given(ids_of(tokenizer), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans(), st.booleans())
    def check(ids, sizes, skip, clean):
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": clean}
        assert "".join(pieces(tokenizer, ids, sizes, **options)) == tokenizer.decode(ids, **options)

    check()


@settings(max_examples=300, deadline=None, database=None)
@given(st.lists(st.sampled_from([" ", "'", "n", "t", "s", "m", "ve", ".", ",", "?", "word"]), max_size=40))
def test_clean_up_adds_up(tokens):
    rust = Tokenizer(models.WordLevel({token: i for i, token in enumerate(dict.fromkeys(tokens))}, unk_token="?"))
    rust.decoder = decoders.Fuse()
    ids = [rust.token_to_id(token) for token in tokens]

    class Holder:
        backend_tokenizer = rust
        added_tokens_decoder: dict = {}  # noqa: RUF012
        clean_up_tokenization_spaces = True

    from cuformers.auto.tokenizers.tokenizer import clean_up_spaces

    assert "".join(pieces(Holder(), ids)) == clean_up_spaces("".join(tokens))


def test_text_comes_as_soon_as_it_is_settled(folders):
    for name in ("generic", "stories"):
        tokenizer = AutoTokenizer.from_pretrained(folders[name])
        ids = tokenizer("a girl 👍 and", add_special_tokens=False).input_ids
        texts = pieces(tokenizer, ids)
        sofar = ""
        for i, text in enumerate(texts[:-1]):
            sofar += text
            if not tokenizer.decode(ids[: i + 1]).endswith("\ufffd"):
                held = tokenizer.decode(ids[: i + 1]).removeprefix(sofar)
                assert held in ("", "👍"), (name, i)  # a run of byte tokens is only settled by what follows it
        assert sofar == "a girl 👍 and"
        assert texts[-1] == ""


def test_incomplete_utf8_is_held_back(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["generic"])
    ids = tokenizer.convert_tokens_to_ids(["ð", "Ł", "ĳ", "ı", "a"])  # the bytes f0 9f 91 8f, and an a
    assert None not in ids
    assert pieces(tokenizer, ids) == ["", "", "", "👏", "a", ""]
    assert pieces(tokenizer, ids[:2]) == ["", "", "\ufffd"]
    assert pieces(tokenizer, [*ids[:2], ids[4]]) == ["", "", "\ufffda", ""]


def test_runs_of_byte_tokens(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["stories"])
    ids = tokenizer.convert_tokens_to_ids(["<0xE4>", "<0xBD>", "<0xA0>", "▁the", "<0x80>", "▁a"])
    assert pieces(tokenizer, ids[:4]) == ["", "", "", "你 the", ""]
    assert pieces(tokenizer, ids[:3]) == ["", "", "", "你"]
    # the whole run is invalid then, as the full decoding has it
    assert pieces(tokenizer, [*ids[:3], *ids[4:]]) == ["", "", "", "", "\ufffd" * 4 + " a", ""]


DECODERS = {
    "none": None,
    "bpe": decoders.BPEDecoder(suffix="</w>"),
    "strip": decoders.Sequence([decoders.Replace("b", "cc"), decoders.Strip(" ", 1, 0)]),
    "fused strip": decoders.Sequence([decoders.Fuse(), decoders.Sequence([decoders.Strip(" ", 2, 0)])]),
    "metaspace": decoders.Metaspace(),
    "whole": decoders.Sequence([decoders.Fuse(), decoders.Strip("|", 0, 1)]),
    "ctc": decoders.CTC(),
}


@pytest.mark.parametrize("name", DECODERS)
def test_other_decoders(tmp_path, name):
    vocabulary = ["a", " a", "  ", "b</w>", "<0x41>", "<0xE4>", "▁▁c", "x", "|", "<pad>", "é"]
    rust = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="x"))
    if DECODERS[name] is not None:
        rust.decoder = DECODERS[name]
    tokenizer = AutoTokenizer.from_pretrained(write_folder(tmp_path, rust))

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.lists(st.integers(0, 10), max_size=12))
    def check(ids):
        if name == "whole" and not ids:
            return  # the Rust library panics there
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)

    check()


def test_time_does_not_grow_with_the_text(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["stories"])
    lone = tokenizer.convert_tokens_to_ids("<0x80>")
    decoder, calls = IncrementalDecoder(tokenizer), 0
    for _ in range(20_000):  # quadratic work would take minutes here
        calls += len(decoder.push(lone))
    assert calls == 0
    assert decoder.finish() == "\ufffd" * 20_000


def test_a_tokenizer_that_only_decodes_is_refused(folders):
    class Decodes:
        decode = AutoTokenizer.from_pretrained(folders["stories"]).decode

    with pytest.raises(ValueError, match=r"tokenizer='Decodes' .*AutoTokenizer"):
        IncrementalDecoder(Decodes())
