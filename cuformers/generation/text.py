"""What generation needs of a tokenizer, and text from a stream of tokens."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

INCOMPLETE = "\ufffd"  # what decoders put for the bytes of an unfinished character
_CLEANED = 4  # clean-up joins " n't" and its like to the word before: that many characters may still change


class Decodes(Protocol):
    """A tokenizer, as far as streamers and stop strings use it."""

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        """The text of a list of token ids."""
        ...


class TextStream:
    """Turns tokens into pieces of text whose sum is the decoded whole; no piece has half a character.

    Only a short window of tokens is decoded at a time. It starts one piece back, because how a token reads depends
    on the one before it (SentencePiece drops a text's leading space).
    """

    def __init__(self, tokenizer: Decodes, decode_kwargs: dict[str, Any] | None = None) -> None:
        self._tokenizer, self._kwargs = tokenizer, decode_kwargs or {}
        # A tokenizer that says nothing about clean-up does none.
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._hold = _CLEANED if self._kwargs.get("clean_up_tokenization_spaces", cleans) else 0
        self._tokens: list[int] = []
        self._said_until = 0
        self._said = ""  # text of the window's tokens that was handed out

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes tokens; returns the text that is certain now, maybe none."""
        self._tokens.extend(token_ids)
        text = self._decode(self._tokens)
        end = len(text) - self._hold
        if text.endswith(INCOMPLETE) or end <= len(self._said):
            return ""
        new = text[len(self._said) : end]
        # What was new before this piece is the next window's context.
        rest = self._tokens[self._said_until :]
        context = self._decode(rest)
        if self._hold == 0 and text.endswith(context) and context:
            self._tokens, self._said = rest, context
        else:
            self._said = text[:end]
        self._said_until = len(self._tokens)
        return new

    def finish(self) -> str:
        """The rest of the text, as far as its characters are complete or not; the stream begins anew."""
        rest = self._decode(self._tokens)[len(self._said) :] if self._tokens else ""
        self._tokens, self._said_until, self._said = [], 0, ""
        return rest

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), **self._kwargs)
