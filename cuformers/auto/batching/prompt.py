"""A prompt of continuous batching: a list of token ids, looked at before anything is made of it."""

from numbers import Integral
from typing import Any

from cuformers.base.errors import bad_argument


def read_prompt(input_ids: Any, vocab_size: int) -> list[int]:
    """The token ids as a list of their own.

    Args:
        input_ids: integers in a list, tuple, 1-D tensor or 1-D array.
        vocab_size: the model's.

    Raises:
        ValueError: no token, one that is no integer, or one outside the vocabulary.
    """
    ids = as_list(input_ids)
    if not ids:
        raise ValueError("input_ids has no token: an empty prompt can't be continued.")
    if set(map(type, ids)) != {int}:
        ids = [_integer(token) for token in ids]
    wrong = next((t for t in (min(ids), max(ids)) if not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise bad_argument("input_ids", wrong, f"0 to {vocab_size - 1}", "Is it the model's tokenizer?")
    return ids


def as_list(input_ids: Any) -> list[Any]:
    """A copy of what may be token ids; Raises ValueError where it is no list of anything."""
    if getattr(input_ids, "is_meta", False):
        raise ValueError("input_ids lies on the meta device, where tensors have no values: pass real tokens.")
    values = input_ids.tolist() if callable(getattr(input_ids, "tolist", None)) else input_ids
    if not isinstance(values, (list, tuple)):
        kind = type(input_ids).__name__
        hint = " Tokenize the text first: tokenizer(text)['input_ids']." if isinstance(input_ids, str) else ""
        raise ValueError(f"input_ids must be a list of token ids, got a {kind}.{hint}")
    return list(values)


def _integer(token: Any) -> int:
    if not isinstance(token, Integral) or isinstance(token, bool):
        hint = "Pass each prompt as a request of its own." if isinstance(token, (list, tuple)) else ""
        raise bad_argument("input_ids", token, "integers", hint)
    return int(token)
