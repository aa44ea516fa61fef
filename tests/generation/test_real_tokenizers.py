"""Streamed text of real tokenizers is their decoded text; needs the optional shared data."""

import lzma
from pathlib import Path

import pytest
from paths import SHARED
from tokenizers import Tokenizer

from cuformers.generation.text import TextStream

FILES = sorted((SHARED / "data" / "tokenizers").glob("*/tokenizer.json.xz"))
TEXT = "Hello  world! It's\n\n 你好世界 😀👩‍👩‍👧 café e\u0301 العربية\t0123456789 <|endoftext|> \u200d end. \n x"


@pytest.mark.skipif(not FILES, reason="no shared data")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.parent.name)
def test_streamed_text_is_the_decoded_text(path: Path) -> None:
    tokenizer = Tokenizer.from_str(lzma.decompress(path.read_bytes()).decode())

    class Decoder:
        def decode(self, token_ids: list[int], **kwargs: object) -> str:
            return tokenizer.decode(token_ids, skip_special_tokens=False)

    ids = tokenizer.encode(TEXT).ids
    stream = TextStream(Decoder())
    pieces = [stream.push([i]) for i in ids]
    assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids, skip_special_tokens=False)
    assert not any("\ufffd" in p for p in pieces)
