"""A tokenizer's vocabulary: tokens and their ids, added tokens, and what encoding puts around a text."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from cuformers.auto.tokenizers.special_tokens import SpecialTokens
from cuformers.auto.tokenizers.stages import template
from cuformers.base.errors import bad_argument


class Vocabulary(SpecialTokens):
    """The part of a tokenizer that maps tokens to ids and back."""

    def __init__(
        self,
        rust: RustTokenizer,
        named: Mapping[str, str | AddedToken],
        extra: Sequence[str | AddedToken],
        *,
        add_bos_token: bool,
        add_eos_token: bool,
    ) -> None:
        self._rust = rust
        # Changing the Rust tokenizer's settings fails while another thread encodes, so both hold this lock.
        self._lock = threading.RLock()
        self._named, self._extra = dict(named), list(extra)
        self._add_bos_token, self._add_eos_token = add_bos_token, add_eos_token

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token, or a list of them; the unknown token's id for what the vocabulary lacks."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._rust.token_to_id(tokens)
        if found is None and str(self._named.get("unk_token", tokens)) != tokens:
            return self.unk_token_id
        return found

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The token of an id, or a list of them; None for an id beyond the vocabulary."""
        if isinstance(ids, int):
            return self._rust.id_to_token(ids)
        skip = set(self.all_special_ids) if skip_special_tokens else ()
        return [self._rust.id_to_token(i) for i in as_ids(ids) if i not in skip]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens."""
        decoder = self._rust.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def add_tokens(
        self, new_tokens: str | AddedToken | Sequence[str | AddedToken], special_tokens: bool = False
    ) -> int:
        """Adds tokens to the vocabulary; returns how many it lacked. Resize the model's embedding by as many."""
        tokens = [new_tokens] if isinstance(new_tokens, (str, AddedToken)) else list(new_tokens)
        if not tokens:
            return 0
        with self._lock:
            return self._rust.add_special_tokens(tokens) if special_tokens else self._rust.add_tokens(tokens)

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """How many special tokens encoding adds to a text (or a pair)."""
        return self._rust.num_special_tokens_to_add(pair)

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id, added ones too."""
        return self._rust.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """The added tokens and their ids, by id."""
        return {token.content: i for i, token in self.added_tokens_decoder.items()}

    vocab = property(get_vocab)
    added_tokens_encoder = property(get_added_vocab)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by id."""
        return dict(sorted(self._rust.get_added_tokens_decoder().items()))

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary without the added ones; `len(tokenizer)` counts them all."""
        return self._rust.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self._rust.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    @property
    def backend_tokenizer(self) -> RustTokenizer:
        """The Rust tokenizer itself."""
        return self._rust

    @property
    def add_bos_token(self) -> bool:
        return self._add_bos_token

    @add_bos_token.setter
    def add_bos_token(self, value: bool) -> None:
        self._surround(bool(value), self._add_eos_token)

    @property
    def add_eos_token(self) -> bool:
        return self._add_eos_token

    @add_eos_token.setter
    def add_eos_token(self, value: bool) -> None:
        self._surround(self._add_bos_token, bool(value))

    def _knows(self, token: str) -> bool:
        return self._rust.token_to_id(token) is not None

    def _surround(self, bos: bool, eos: bool) -> None:
        for name, wanted in (("bos_token", bos), ("eos_token", eos)):
            if wanted and self._named_id(name) is None:
                raise bad_argument(f"add_{name}", True, "False", f"This tokenizer has no {name}: set one first.")
        self._add_bos_token, self._add_eos_token = bos, eos
        with self._lock:
            self._rust.post_processor = template(
                (self.bos_token or "", self.bos_token_id or 0) if bos else None,
                (self.eos_token or "", self.eos_token_id or 0) if eos else None,
            )


def as_ids(value: Any) -> list[Any]:
    """Ids of any kind (a number, nested lists, an array, a tensor on any device) as nested lists of int."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = value["input_ids"]
        return as_ids(value)
    if isinstance(value, int):
        return [value]
    return [as_ids(v) if isinstance(v, (list, tuple)) or getattr(v, "ndim", 0) else int(v) for v in value]
