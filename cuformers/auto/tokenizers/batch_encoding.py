"""What a tokenizer returns: named lists or tensors, and for each sequence where its tokens lie in the text."""

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Encoding

from cuformers.base.errors import bad_argument

if TYPE_CHECKING:
    import torch


class CharSpan(NamedTuple):
    """Characters [start, end) of a text."""

    start: int
    end: int


class TokenSpan(NamedTuple):
    """Tokens [start, end) of a sequence."""

    start: int
    end: int


class BatchEncoding(UserDict):
    """A dict of `input_ids`, `attention_mask` ...; `x.input_ids` is `x["input_ids"]`, `x[0]` the first Encoding.

    The methods about places take (batch index, place), or the place alone for the first sequence.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | None = None,
        encodings: Sequence[Encoding] | None = None,
        tensor_type: str | None = None,
    ) -> None:
        super().__init__(data or {})
        self._encodings = None if encodings is None else list(encodings)
        self.convert_to_tensors(tensor_type)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.data[key]
        if isinstance(key, slice):
            return {name: value[key] for name, value in self.data.items()}
        return self._encoding(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "data" or name not in self.data:
            raise AttributeError(f"BatchEncoding has no {name!r}: it has {list(self.__dict__.get('data', {}))}")
        return self.data[name]

    @property
    def encodings(self) -> list[Encoding] | None:
        return self._encodings

    @property
    def is_fast(self) -> bool:
        return self._encodings is not None

    @property
    def n_sequences(self) -> int | None:
        """1 for single texts, 2 for pairs."""
        return self._encodings[0].n_sequences if self._encodings else None

    def convert_to_tensors(self, tensor_type: str | None) -> "BatchEncoding":
        """Makes every list a tensor: "pt" (torch, int64) or "np" (numpy, int64); None changes nothing."""
        if tensor_type is None:
            return self
        if tensor_type not in ("pt", "np"):
            raise bad_argument("return_tensors", tensor_type, "None, 'pt' or 'np'")
        for name, value in self.data.items():
            if isinstance(value, list):
                self.data[name] = _tensor(name, value, tensor_type)
        return self

    def to(self, device: "str | int | torch.device", *, non_blocking: bool = False) -> "BatchEncoding":
        """Moves its tensors to a device, in place, and returns itself."""
        import torch

        if not isinstance(device, (str, int, torch.device)):
            raise bad_argument(
                "device", device, "a device such as 'cuda', 'cuda:1', 0", "Token ids have no dtype to set."
            )
        tensors = {name: value for name, value in self.data.items() if isinstance(value, torch.Tensor)}
        if not tensors and self.data:
            raise ValueError(f"to({device!r}) has no tensor to move. Pass return_tensors='pt' to the tokenizer.")
        self.data.update({k: v.to(device=device, non_blocking=non_blocking) for k, v in tensors.items()})
        return self

    def tokens(self, batch_index: int = 0) -> list[str]:
        return self._encoding(batch_index).tokens

    def word_ids(self, batch_index: int = 0) -> list[int | None]:
        """For each token the index of its word, None for special tokens."""
        return self._encoding(batch_index).word_ids

    def sequence_ids(self, batch_index: int = 0) -> list[int | None]:
        """For each token 0 or 1, the sequence of the pair that it belongs to; None for special tokens."""
        return self._encoding(batch_index).sequence_ids

    def char_to_token(self, first: int, second: int | None = None, sequence_index: int = 0) -> int | None:
        encoding, char = self._place(first, second)
        return encoding.char_to_token(char, sequence_index)

    def char_to_word(self, first: int, second: int | None = None, sequence_index: int = 0) -> int | None:
        encoding, char = self._place(first, second)
        return encoding.char_to_word(char, sequence_index)

    def token_to_chars(self, first: int, second: int | None = None) -> CharSpan | None:
        encoding, token = self._place(first, second)
        span = encoding.token_to_chars(_from_end(encoding, token))
        return None if span is None else CharSpan(*span)

    def token_to_word(self, first: int, second: int | None = None) -> int | None:
        encoding, token = self._place(first, second)
        return encoding.token_to_word(_from_end(encoding, token))

    def token_to_sequence(self, first: int, second: int | None = None) -> int | None:
        encoding, token = self._place(first, second)
        return encoding.token_to_sequence(_from_end(encoding, token))

    def word_to_tokens(self, first: int, second: int | None = None, sequence_index: int = 0) -> TokenSpan | None:
        encoding, word = self._place(first, second)
        span = encoding.word_to_tokens(word, sequence_index)
        return None if span is None else TokenSpan(*span)

    def word_to_chars(self, first: int, second: int | None = None, sequence_index: int = 0) -> CharSpan | None:
        encoding, word = self._place(first, second)
        span = encoding.word_to_chars(word, sequence_index)
        return None if span is None else CharSpan(*span)

    def _place(self, first: int, second: int | None) -> tuple[Encoding, int]:
        return (self._encoding(0), first) if second is None else (self._encoding(first), second)

    def _encoding(self, index: int) -> Encoding:
        if self._encodings is None:
            raise KeyError(f"{index!r}: this BatchEncoding was not made by a tokenizer call and knows only its names")
        return self._encodings[index]


def _from_end(encoding: Encoding, token: int) -> int:
    return token + len(encoding.ids) if token < 0 else token


def _tensor(name: str, value: list[Any], kind: str) -> Any:
    import numpy as np

    rows = [len(row) for row in value if isinstance(row, (list, tuple))]
    if len(set(rows)) > 1:
        raise ValueError(
            f"{name} can't become a tensor: its sequences have {min(rows)} to {max(rows)} tokens. Pass padding=True, "
            "or truncation=True with a max_length that all of them reach."
        )
    array = np.asarray(value, dtype=None if _has_items(value) else np.int64)
    if kind == "np":
        return array
    import torch

    return torch.from_numpy(array)


def _has_items(value: Sequence[Any]) -> bool:
    return any(_has_items(item) if isinstance(item, (list, tuple)) else True for item in value)
