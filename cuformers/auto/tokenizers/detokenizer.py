"""Text from ids as they come: what is pushed adds up to the decoding of all ids at once, exactly.

A tokenizer's decoder is a chain of steps over tokens. Each step here takes one token at a time and holds back only what
a later token can still change: an incomplete UTF-8 sequence, a run of byte tokens (invalid as a whole or not at all),
the spaces that a clean-up may take out.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as RustTokenizer

from cuformers.auto.tokenizers.stages import parsed, part
from cuformers.auto.tokenizers.tokenizer import clean_up_spaces, cleans_up
from cuformers.auto.tokenizers.vocabulary import as_ids
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_LONGEST_CLEAN_UP = 4  # characters of the longest pattern that clean-up looks for


class HasDecoder(Protocol):
    """A tokenizer over the Rust library: AutoTokenizer's, or a fast one of Transformers."""

    clean_up_tokenization_spaces: bool

    @property
    def backend_tokenizer(self) -> RustTokenizer: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...


class _Step(Protocol):
    """One step of decoding. `push` returns the tokens that are settled, `finish` what was held back."""

    def push(self, token: str) -> list[str]: ...
    def finish(self) -> list[str]: ...


class IncrementalDecoder:
    """Decodes one sequence of ids as they come, in constant time a token.

    The texts of all pushes and of `finish` add up to `tokenizer.decode` of all ids, whatever the ids.
    """

    def __init__(
        self,
        tokenizer: HasDecoder,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> None:
        """
        Raises:
            ValueError: a tokenizer that is not over the Rust library, whose `decode` alone can't tell what is settled.
        """
        rust = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(rust, RustTokenizer):
            kind = type(tokenizer).__name__
            raise bad_argument("tokenizer", kind, "one over the tokenizers library", "Make it with AutoTokenizer.")
        self._token_of = rust.id_to_token
        special = (token for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._skipped = {token.content for token in special} if skip_special_tokens else set()
        self._steps = _steps(part(rust, "decoder"), rust.decoder)
        asked = clean_up_tokenization_spaces
        if cleans_up(rust, tokenizer.clean_up_tokenization_spaces if asked is None else asked):
            self._steps.append(_CleanUp())

    def push(self, token_ids: Any) -> str:
        """The text that these ids settle: an id, or a list, array or tensor of them."""
        ids = (token_ids,) if isinstance(token_ids, int) else as_ids(token_ids)
        tokens = [self._token_of(i) for i in ids]
        return "".join(self._through(0, [t for t in tokens if t is not None and t not in self._skipped]))

    def finish(self) -> str:
        """What was held back. The sequence ends here."""
        texts: list[str] = []
        for i, step in enumerate(self._steps):
            texts += self._through(i + 1, step.finish())
        return "".join(texts)

    def _through(self, first: int, tokens: list[str]) -> list[str]:
        for step in self._steps[first:]:
            tokens = [made for token in tokens for made in step.push(token)]
        return tokens


class _EachToken:
    """A step that maps every token by itself; only whether it is the first one may matter."""

    def __init__(self, of_first: Callable[[str], str], of_later: Callable[[str], str]) -> None:
        self._of_first, self._of_later = of_first, of_later
        self._known: dict[str, str] = {}
        self._started = False

    def push(self, token: str) -> list[str]:
        if not self._started:
            self._started = True
            return [self._of_first(token)]
        made = self._known.get(token)
        if made is None:
            made = self._known[token] = self._of_later(token)
        return [made]

    def finish(self) -> list[str]:
        return []


class _Utf8:
    """ByteLevel: tokens spell bytes, the bytes of all of them are UTF-8; invalid ones become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._known: dict[str, bytes] = {}

    def push(self, token: str) -> list[str]:
        spelled = self._known.get(token)
        if spelled is None:
            spelled = self._known[token] = _spelled_bytes(token)
        return [self._decoder.decode(spelled)]

    def finish(self) -> list[str]:
        return [self._decoder.decode(b"", final=True)]


class _ByteRuns:
    """ByteFallback: a run of tokens <0xE4> is text where it is valid UTF-8 as a whole, else U+FFFD for each."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> list[str]:
        spelled = _BYTE_TOKEN.fullmatch(token) if len(token) == 6 else None
        if spelled is None:
            return [*self.finish(), token]
        self._run.append(int(spelled.group(1), 16))
        return []

    def finish(self) -> list[str]:
        run, self._run = self._run, bytearray()
        try:
            return [run.decode("utf-8")] if run else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class _StripStart:
    """Takes up to `count` of a character off the start of the whole text."""

    def __init__(self, character: str, count: int) -> None:
        self._character, self._left = character, count

    def push(self, token: str) -> list[str]:
        while self._left and token:
            if not token.startswith(self._character):
                self._left = 0
                break
            token, self._left = token[1:], self._left - 1
        return [token]

    def finish(self) -> list[str]:
        return []


class _LastDiffers:
    """BPEDecoder: an end-of-word mark is a space, except on the last token."""

    def __init__(self, of_later: Callable[[str], str], of_last: Callable[[str], str]) -> None:
        self._of_later, self._of_last = of_later, of_last
        self._held: str | None = None

    def push(self, token: str) -> list[str]:
        held, self._held = self._held, token
        return [] if held is None else [self._of_later(held)]

    def finish(self) -> list[str]:
        return [] if self._held is None else [self._of_last(self._held)]


class _CleanUp:
    """`clean_up_spaces` over a growing text. Every pattern begins with a space and is at most 4 characters long, so
    what follows 4 characters without a space does not depend on what came before them."""

    def __init__(self) -> None:
        self._held, self._searched = "", _LONGEST_CLEAN_UP

    def push(self, token: str) -> list[str]:
        self._held += token
        for end in range(len(self._held), self._searched - 1, -1):
            if " " not in self._held[end - _LONGEST_CLEAN_UP : end]:
                return [self._take(end)]
        self._searched = max(len(self._held), _LONGEST_CLEAN_UP)
        return []

    def finish(self) -> list[str]:
        return [self._take(len(self._held))]

    def _take(self, end: int) -> str:
        text, self._held = clean_up_spaces(self._held[:end]), self._held[end:]
        self._searched = _LONGEST_CLEAN_UP
        return text


class _Whole:
    """A decoder of an unknown kind: nothing is settled before the end."""

    def __init__(self, decoder: decoders.Decoder) -> None:
        self._decoder = decoder
        self._tokens: list[str] = []

    def push(self, token: str) -> list[str]:
        self._tokens.append(token)
        return []

    def finish(self) -> list[str]:
        return [self._decoder.decode(self._tokens)] if self._tokens else []


def _steps(state: dict[str, Any], decoder: decoders.Decoder | None) -> list[_Step]:
    """The steps of a decoder, `state` being its spelling in tokenizer.json."""
    if decoder is None:
        return [_EachToken(str, lambda token: " " + token)]
    steps: list[_Step] = []
    joined = False  # whether the steps so far make one token of all, so that a step sees pieces of it
    for kind in _flat(state):
        name = kind["type"]
        step = _step(kind, joined)
        if step is None and name != "Fuse":
            notice(f"the decoder step {name} can't be streamed: the text comes when the sequence ends", once=True)
            return [_Whole(decoder)]
        steps += [] if step is None else [step]
        joined = joined or name in ("Fuse", "ByteLevel")
    return steps


def _step(kind: dict[str, Any], joined: bool) -> _Step | None:
    name = kind["type"]
    if joined:
        return _StripStart(kind["content"], kind["start"]) if name == "Strip" and not kind["stop"] else None
    if name == "ByteLevel":
        return _Utf8()
    if name == "ByteFallback":
        return _ByteRuns()
    if name in ("Metaspace", "WordPiece", "Replace", "Strip", "BPEDecoder"):
        decode = parsed("decoder", kind).decoder.decode
        if name == "BPEDecoder":
            return _LastDiffers(lambda token: decode([token, ""]), lambda token: decode([token]))
        if name in ("Replace", "Strip"):
            return _EachToken(lambda token: decode([token]), lambda token: decode([token]))
        return _EachToken(lambda token: decode([token]), lambda token: decode(["", token]))
    return None


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] == "Sequence":
        return [kind for inner in state["decoders"] for kind in _flat(inner)]
    return [state]


def _spelled_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary spells; a token with other characters stands for itself."""
    table = _byte_of()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _byte_of() -> dict[str, int]:
    """GPT-2's spelling: printable bytes of Latin-1 as themselves, the 68 others as the characters from U+0100 up."""
    if not _BYTE_OF:
        plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in plain]
        _BYTE_OF.update({chr(byte): byte for byte in plain})
        _BYTE_OF.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return _BYTE_OF


_BYTE_OF: dict[str, int] = {}
