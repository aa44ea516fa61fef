"""How a tokenizer call pads and truncates: the options, checked and resolved, then applied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cuformers.auto.tokenizers.batch_encoding import BatchEncoding
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice

NO_LIMIT = int(1e30)
_REAL_LIMIT = int(1e20)  # a model_max_length above it means: none known
TRUNCATIONS = ("longest_first", "only_first", "only_second")
NO_PAD_TOKEN = (
    "padding needs a pad token and this tokenizer has none. Set one: tokenizer.pad_token = tokenizer.eos_token, or "
    "add one with tokenizer.add_special_tokens({'pad_token': '[PAD]'}) and resize the model's embedding."
)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Padding and truncation of one call, resolved."""

    padding: Literal["longest", "max_length"] | None
    """Pad to the longest sequence, to `max_length`, or not."""
    truncation: str | None
    """One of TRUNCATIONS, or None for no truncation."""
    max_length: int | None
    """Tokens, special ones counted; None where nothing needs it."""
    multiple: int | None
    """Padded lengths are rounded up to a multiple of this."""

    def padded(self, lengths: Sequence[int]) -> int:
        """The length that sequences of these lengths are padded to."""
        most = max(lengths, default=0)
        length = self.max_length or 0 if self.padding == "max_length" else most
        return -(-length // self.multiple) * self.multiple if self.multiple else length


def resolve_lengths(
    padding: bool | str = False,
    truncation: bool | str | None = None,
    max_length: int | None = None,
    pad_to_multiple_of: int | None = None,
    *,
    model_max_length: int,
) -> Lengths:
    """Transformers' meaning of these options; what contradicts or can't be honoured raises ValueError."""
    if max_length is not None and padding is False and truncation is None:
        truncation = True
    pad = _padding(padding)
    cut = _truncation(truncation)
    if max_length is not None and max_length < 0:
        raise bad_argument("max_length", max_length, "a number of tokens")
    if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
        raise bad_argument("pad_to_multiple_of", pad_to_multiple_of, "a positive number")
    if pad_to_multiple_of is not None and pad is None:
        pad_to_multiple_of = None
    if max_length is not None and pad == "longest" and cut is None:
        notice(
            "max_length has no effect with padding=True and no truncation: pass truncation=True or "
            "padding='max_length'",
            once=True,
        )
    if max_length is None and (pad == "max_length" or cut is not None):
        if model_max_length < _REAL_LIMIT:
            max_length = model_max_length
        elif pad == "max_length":
            raise ValueError("padding='max_length' needs max_length=: this tokenizer knows no model_max_length.")
        else:
            notice("truncation has no effect: pass max_length=, this tokenizer knows no model_max_length", once=True)
            cut = None
    if cut and pad and pad_to_multiple_of and (max_length or 0) % pad_to_multiple_of:
        raise bad_argument("max_length", max_length, f"a multiple of pad_to_multiple_of={pad_to_multiple_of}")
    return Lengths(padding=pad, truncation=cut, max_length=max_length, multiple=pad_to_multiple_of)


def _padding(value: bool | str) -> Literal["longest", "max_length"] | None:
    value = getattr(value, "value", value)  # an enum of Transformers' is spelled by its value
    if value is True or value == "longest":
        return "longest"
    if value == "max_length":
        return "max_length"
    if value is False or value == "do_not_pad":
        return None
    raise bad_argument("padding", value, "True, False, 'longest', 'max_length' or 'do_not_pad'")


def _truncation(value: bool | str | None) -> str | None:
    value = getattr(value, "value", value)
    if value is True:
        return "longest_first"
    if value in TRUNCATIONS:
        return str(value)
    if value in (None, False, "do_not_truncate"):
        return None
    raise bad_argument("truncation", value, f"True, False, 'do_not_truncate', {', '.join(map(repr, TRUNCATIONS))}")


def check_truncation(lengths: Lengths, stride: int, specials: int) -> None:
    """ValueError where no text fits beside the special tokens, or where rows of overflow would not advance."""
    room = (lengths.max_length or 0) - specials
    if room < 0:
        raise bad_argument(
            "max_length", lengths.max_length, f"{specials} or more: encoding adds {specials} special tokens"
        )
    if stride and not 0 < stride < room:
        raise bad_argument("stride", stride, f"0 to {max(room - 1, 0)} with max_length={lengths.max_length}")


def truncation_error(error: BaseException, lengths: Lengths, stride: int) -> BaseException:
    """The Rust library's failure while truncating, as a ValueError; other failures as they are."""
    if type(error).__name__ == "PanicException":  # one sequence of a pair keeps no more tokens than the stride
        return bad_argument(
            "stride", stride, f"less: a pair cut to max_length={lengths.max_length} leaves no room for it"
        )
    if type(error) is Exception:
        remedy = "Use truncation='longest_first', or a larger max_length."
        return ValueError(f"truncation={lengths.truncation!r} to max_length={lengths.max_length}: {error} {remedy}")
    return error


def check_side(name: str, value: str) -> str:
    """`value`, where it is a side."""
    if value not in ("left", "right"):
        raise bad_argument(name, value, "'left' or 'right'")
    return value


def as_batch(text: Any, text_pair: Any, is_split_into_words: bool) -> tuple[list[Any], bool]:
    """The inputs as a list (of texts, or of pairs) and whether the caller gave a batch.

    A text is a str, or with `is_split_into_words` a list of str. ValueError names what is neither.
    """
    if is_split_into_words:
        batched = isinstance(text, (list, tuple)) and bool(text) and isinstance(text[0], (list, tuple))
    else:
        batched = isinstance(text, (list, tuple))
    if not batched:
        single = [text] if not text_pair else [(text, text_pair)]
        _check_texts("text", [text], is_split_into_words)
        if text_pair:
            _check_texts("text_pair", [text_pair], is_split_into_words)
        return single, False
    if text_pair is None:
        _check_texts("text", text, is_split_into_words, pairs=True)
        return [tuple(item) if _is_pair(item, is_split_into_words) else item for item in text], True
    if not isinstance(text_pair, (list, tuple)) or len(text_pair) != len(text):
        raise ValueError(f"text_pair must be a list of {len(text)}, one for each text.")
    _check_texts("text", text, is_split_into_words)
    _check_texts("text_pair", text_pair, is_split_into_words)
    return list(zip(text, text_pair)), True


def _is_pair(item: Any, words: bool) -> bool:
    inner = (list, tuple) if words else str
    return isinstance(item, (list, tuple)) and len(item) == 2 and all(isinstance(part, inner) for part in item)


def _check_texts(name: str, texts: Sequence[Any], words: bool, pairs: bool = False) -> None:
    for i, text in enumerate(texts):
        where = f"{name}[{i}]" if len(texts) > 1 else name
        if pairs and _is_pair(text, words):
            _check_texts(where, text, words)
        elif words and isinstance(text, (list, tuple)):
            _check_texts(where, text, False)
        elif not isinstance(text, str) or words:
            raise ValueError(
                f"{where} is {type(text).__name__} {str(text)[:40]!r}: a text is a "
                + ("list of str (is_split_into_words=True)." if words else "str.")
            )
        elif not _encodable(text):
            raise ValueError(
                f"{where} has a lone surrogate, which is no Unicode text. Repair it where it was read, "
                "or: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
            )


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def pad_dict(tokenizer: Any, inputs: Any, lengths: Lengths, side: str, with_mask: bool | None) -> BatchEncoding:
    """Pads already encoded inputs: a dict of lists, or a list of dicts (a data collator's).

    Knows input_ids, attention_mask, token_type_ids and special_tokens_mask; other names are handed on unchanged.
    """
    if not isinstance(inputs, Mapping):
        inputs = {name: [example[name] for example in inputs] for name in inputs[0]}
    columns = {name: _plain(value) for name, value in inputs.items()}
    main = tokenizer.model_input_names[0]
    if main not in columns:
        raise ValueError(f"pad needs {main!r}: it was given {list(columns)}.")
    single = not columns[main] or not isinstance(columns[main][0], list)
    if single:
        columns = {name: [value] for name, value in columns.items()}
    sizes = [len(row) for row in columns[main]]
    if with_mask or (with_mask is None and "attention_mask" in tokenizer.model_input_names):
        columns.setdefault("attention_mask", [[1] * size for size in sizes])
    if lengths.padding:
        length = lengths.padded(sizes)
        fill = {main: tokenizer.pad_token_id, "attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1}
        for name in fill.keys() & columns.keys():
            columns[name] = [_filled(row, fill[name], length, side) for row in columns[name]]
    if single:
        columns = {name: value[0] for name, value in columns.items()}
    return BatchEncoding(columns)


def _filled(row: list[int], value: int, length: int, side: str) -> list[int]:
    fill = [value] * (length - len(row))
    return row + fill if side == "right" else fill + row


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
