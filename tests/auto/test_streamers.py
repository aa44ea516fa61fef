"""Streamed text is the decoded whole, as Transformers' streamers give it, and no piece has half a character."""

import asyncio
import threading
from queue import Empty

import pytest
import torch
import transformers
from generation.toy_tokenizers import byte_fallback, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st

from cuformers.auto.streamers import AsyncTextIteratorStreamer, BaseStreamer, TextIteratorStreamer, TextStreamer
from cuformers.auto.tokenizers.detokenizer import IncrementalDecoder

TEXTS = [
    "Once upon a time there was a cat.",
    "你好世界! こんにちは 😀👩‍👩‍👧 café naïve",
    "line one\n\n  indented line\ttab\nlast line \n",
    "It's don't  ,  spaced . out !",
    "",
]
TOKENIZERS = [byte_level, byte_fallback]


def pieces_of(cls: type, tokenizer, prompt: torch.Tensor, tokens: list[int], **options) -> list[str]:
    streamer = cls(tokenizer, **options)
    streamer.put(prompt)
    for token in tokens:
        streamer.put(torch.tensor([token]))
    streamer.end()
    return list(streamer)


@pytest.mark.parametrize("options", [{}, {"skip_prompt": True}, {"skip_special_tokens": True}])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", TOKENIZERS)
def test_joined_text_is_transformers(make, text: str, options: dict) -> None:
    tokenizer = make()
    prompt = torch.tensor([[tokenizer.bos_token_id, *tokenizer("The cat").input_ids]])
    tokens = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    ours = pieces_of(TextIteratorStreamer, tokenizer, prompt, tokens, **options)
    skip_prompt, skip = options.get("skip_prompt", False), options.get("skip_special_tokens", False)
    whole = tokenizer.decode(tokens if skip_prompt else [*prompt[0].tolist(), *tokens], skip_special_tokens=skip)
    assert "".join(ours) == whole
    assert not any("\ufffd" in piece for piece in ours)
    theirs = "".join(pieces_of(transformers.TextIteratorStreamer, tokenizer, prompt, tokens, **options))
    if make is byte_level or "\n" not in text:
        assert "".join(ours) == theirs
    else:  # Transformers decodes anew after a line's end, and SentencePiece then drops the space that follows
        assert whole.replace("\n ", "\n").split() == theirs.replace("\n ", "\n").split()


def test_text_is_printed(capsys: pytest.CaptureFixture) -> None:
    tokenizer = byte_level()
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    for turn in ("the cat 😀", "the dog"):
        streamer.put(torch.tensor([[1, 2, 3]]))
        for token in tokenizer(turn).input_ids:
            streamer.put(torch.tensor([token]))
        streamer.end()
        assert capsys.readouterr().out == turn + "\n"


@given(st.lists(st.integers(2, 399), max_size=40), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_byte_level_tokens(tokens: list[int], clean: bool) -> None:
    tokenizer = byte_level()
    tokens = [t for t in tokens if t < len(tokenizer)]
    options = {"clean_up_tokenization_spaces": clean}
    stream = IncrementalDecoder(tokenizer, **options)
    assert "".join([*(stream.push([t]) for t in tokens), stream.finish()]) == tokenizer.decode(tokens, **options)


@given(st.text(alphabet="Oncethecat stop.,!'\n😀你é\t ", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_sentencepiece_text(text: str) -> None:
    tokenizer = byte_fallback()
    tokens = [1, *tokenizer(text).input_ids, 2]
    for skip in (False, True):
        stream = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
        pieces = [stream.push([t]) for t in tokens]
        assert not any("\ufffd" in p for p in pieces)
        assert "".join([*pieces, stream.finish()]) == tokenizer.decode(tokens, skip_special_tokens=skip)


def test_pieces_come_as_soon_as_they_are_complete() -> None:
    tokenizer = byte_level()
    stream = IncrementalDecoder(tokenizer)
    tokens = tokenizer("hop 你 a").input_ids
    assert [stream.push([t]) for t in tokens] == [
        "" if tokenizer.decode(tokens[: i + 1]).endswith("\ufffd") else
        tokenizer.decode(tokens[: i + 1])[len(tokenizer.decode(tokens[:i]).rstrip("\ufffd")) :]
        for i in range(len(tokens))
    ]  # fmt: skip


def test_several_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="one row"):
        TextStreamer(byte_level()).put(torch.zeros(2, 3, dtype=torch.int64))


def test_iterating_from_another_thread() -> None:
    tokenizer = byte_level()
    streamer = TextIteratorStreamer(tokenizer, timeout=10)
    args = (tokenizer, streamer, "Once upon a 😀 time")
    thread = threading.Thread(target=feed, args=args)
    thread.start()
    assert "".join(streamer) == args[2]
    thread.join()
    with pytest.raises(Empty):
        next(TextIteratorStreamer(tokenizer, timeout=0.01))


def feed(tokenizer, streamer: BaseStreamer, text: str) -> None:
    for token in tokenizer(text).input_ids:
        streamer.put(torch.tensor([token]))
    streamer.end()


def test_iterating_in_a_coroutine() -> None:
    tokenizer, text = byte_level(), "The dog 😀 said stop"

    async def main() -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer, timeout=10)
        thread = threading.Thread(target=feed, args=(tokenizer, streamer, text))
        thread.start()
        joined = "".join([piece async for piece in streamer])
        thread.join()
        with pytest.raises(TimeoutError):
            await anext(AsyncTextIteratorStreamer(tokenizer, timeout=0.01))
        return joined

    assert asyncio.run(main()) == text
