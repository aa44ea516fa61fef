"""Which values the options of GenerationConfig may have, one check a kind of value."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from cuformers.base.errors import bad_argument


def check_values(options: Mapping[str, Any]) -> None:
    """Raises ValueError for the first option whose value is out of its range; None is always allowed."""
    for name, value in options.items():
        if value is not None:
            check_option(name, value)
    _check_forced(options)


def check_option(name: str, value: Any) -> None:
    """Raises ValueError where the value of one option, not None, is out of its range."""
    allowed, holds = _RULES[name]
    if not holds(value):
        raise bad_argument(name, value, f"{allowed}, or None", _REMEDIES.get(name, ""))


def _check_forced(options: Mapping[str, Any]) -> None:
    suppressed = set(options["suppress_tokens"] or ())
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        forced = {options[name]} if is_id(options[name]) else set(options[name] or ())
        if forced and forced <= suppressed:
            raise bad_argument(
                name, options[name], "a token that suppress_tokens does not ban",
                "Take it out of suppress_tokens; min_new_tokens keeps a sequence from ending early.",
            )  # fmt: skip


def is_id(value: object) -> bool:
    """Whether the value is an integer (numpy's too), booleans excluded."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: is_id(value) and value >= least


def _within(low: float, high: float, *, open_low: bool = False) -> Callable[[Any], bool]:
    return lambda value: _number(value) and (low < value if open_low else low <= value) and value <= high


def _ids(value: object) -> bool:
    return isinstance(value, Sequence) and all(is_id(i) and i >= 0 for i in value)


def _id_or_ids(value: object) -> bool:
    # Negative ids occur in published files as "none"; resolve() drops them.
    return is_id(value) or (isinstance(value, Sequence) and all(is_id(i) for i in value))


def _id_lists(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(_ids(ids) and len(ids) > 0 for ids in value)


def _bias(value: Any) -> bool:
    if isinstance(value, Mapping):
        pairs: list = list(value.items())
    elif isinstance(value, Sequence) and all(isinstance(p, Sequence) and len(p) == 2 for p in value):
        pairs = list(value)
    else:
        return False
    return len(pairs) > 0 and all(_ids(ids) and len(ids) > 0 and isinstance(b, Real) and b == b for ids, b in pairs)


def _strings(value: object) -> bool:
    many = [value] if isinstance(value, str) else value
    return isinstance(many, Sequence) and len(many) > 0 and all(isinstance(s, str) and s for s in many)


def _decay(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and is_id(value[0]) and _number(value[1])


def _seed(value: object) -> bool:
    return is_id(value) or (isinstance(value, Sequence) and len(value) > 0 and all(is_id(s) for s in value))


def _flag(value: object) -> bool:
    return isinstance(value, bool)


_COUNT = ("an integer from 1", _whole(1))
_COUNT0 = ("an integer from 0", _whole(0))
_BOOL = ("True or False", _flag)
_CUTOFF = ("a number from 0 (off) to 1", _within(0.0, 1.0))
_SUM = ("a number from 0 to 1 (off)", _within(0.0, 1.0))
_SHARE = ("a number above 0, up to 1", _within(0.0, 1.0, open_low=True))
_PENALTY = ("a number from -2 to 2", _within(-2.0, 2.0))
_TOKENS = ("a list of token ids", _ids)
_ONE_OR_MORE = ("a token id or a list of them", _id_or_ids)
_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "max_length": _COUNT,
    "max_new_tokens": _COUNT,
    "min_length": _COUNT0,
    "min_new_tokens": _COUNT0,
    "max_time": ("a number of seconds above 0", _within(0.0, math.inf, open_low=True)),
    "stop_strings": ("a string that is not empty, or a list of them", _strings),
    "do_sample": _BOOL,
    "temperature": ("a number from 0", _within(0.0, math.inf)),
    "top_k": ("an integer from 0 (off)", _whole(0)),
    "top_p": _SUM,
    "min_p": _CUTOFF,
    "top_h": _SHARE,
    "typical_p": _SHARE,
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
    "seed": ("an integer, or a list with one for each row", _seed),
    "repetition_penalty": ("a number above 0", _within(0.0, math.inf, open_low=True)),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "no_repeat_ngram_size": _COUNT0,
    "bad_words_ids": ("a list of lists of token ids, none of them empty", _id_lists),
    "sequence_bias": ("{(token ids): number} or [[[token ids], number], ...]", _bias),
    "suppress_tokens": _TOKENS,
    "begin_suppress_tokens": _TOKENS,
    "forced_bos_token_id": ("a token id", _whole(0)),
    "forced_eos_token_id": _ONE_OR_MORE,
    "exponential_decay_length_penalty": ("(start token, factor)", _decay),
    "renormalize_logits": _BOOL,
    "remove_invalid_values": _BOOL,
    "num_beams": _COUNT,
    "length_penalty": ("a number", _number),
    "early_stopping": ("True, False or 'never'", lambda value: _flag(value) or value == "never"),
    "prompt_lookup_num_tokens": ("an integer from 0 to 31", lambda value: _whole(0)(value) and value <= 31),
    "num_assistant_tokens": ("an integer from 1 to 31", lambda value: _whole(1)(value) and value <= 31),
    "max_matching_ngram_size": ("an integer from 1 to 16", lambda value: _whole(1)(value) and value <= 16),
    "num_return_sequences": _COUNT,
    "return_dict_in_generate": _BOOL,
    "output_scores": _BOOL,
    "output_logits": _BOOL,
    "output_logprobs": _BOOL,
    "pad_token_id": ("a token id", is_id),
    "bos_token_id": _ONE_OR_MORE,
    "eos_token_id": _ONE_OR_MORE,
}
_REMEDIES = {
    "temperature": "For greedy decoding set do_sample=False.",
    "max_new_tokens": "To read a prompt without generating, call the model itself.",
}
