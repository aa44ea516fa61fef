"""Streamed text of real tokenizers is their decoded text; needs the optional shared data."""

import lzma
from pathlib import Path

import pytest
from paths import SHARED
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cuformers.auto.tokenizers.detokenizer import IncrementalDecoder

FILES = sorted((SHARED / "data" / "tokenizers").glob("*/tokenizer.json.xz"))
TEXT = "Hello  world! It's\n\n 你好世界 😀👩‍👩‍👧 café e\u0301 العربية\t0123456789 <|endoftext|> \u200d end. \n x"


@pytest.mark.skipif(not FILES, reason="no shared data")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.parent.name)
def test_streamed_text_is_the_decoded_text(path: Path) -> None:
    rust = Tokenizer.from_str(lzma.decompress(path.read_bytes()).decode())
    ids = rust.encode(TEXT).ids
    decoder = IncrementalDecoder(PreTrainedTokenizerFast(tokenizer_object=rust))
    pieces = [decoder.push(i) for i in ids]
    assert "".join([*pieces, decoder.finish()]) == rust.decode(ids, skip_special_tokens=False)
    assert not any("\ufffd" in p for p in pieces)
