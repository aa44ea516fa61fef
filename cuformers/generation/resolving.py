"""From what the user, the checkpoint and the defaults say to the one set of options that a request runs with."""

from collections.abc import Mapping
from typing import Any

from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.generation.config import FIELDS, GenerationConfig, check_config
from cuformers.generation.resolved import ResolvedGeneration
from cuformers.generation.unsupported import check_unsupported

DEFAULT_NEW_TOKENS = 20
_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0}
_SAMPLING: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Options that only act when sampling, with the value at which saying so would be noise."""
_BEAMS: Mapping[str, Any] = {"length_penalty": 1.0, "early_stopping": False}
"""The same of options that only act in beam search."""


def resolve(
    config: GenerationConfig | None,
    model_defaults: GenerationConfig | None,
    kwargs: Mapping[str, Any],
    prompt_length: int,
    *,
    max_positions: int | None = None,
    batch_size: int = 1,
    has_mask: bool = True,
) -> ResolvedGeneration:
    """Merges and completes the options of one `generate` call, as Transformers 5.17 does.

    kwargs count most (a None there switches the option off), then the user's config, then the checkpoint's, then
    the defaults.

    Args:
        config: what the user passed as generation_config.
        model_defaults: model.generation_config.
        kwargs: options passed to generate by name.
        prompt_length: tokens of the prompt.
        max_positions: the model's max_position_embeddings; bounds the default length only.
        batch_size: rows of the call, for the notice about padding.
        has_mask: whether an attention mask was given or needed.

    Raises:
        ValueError: an unknown, unsupported or impossible option; a prompt that fills max_length.
    """
    check_config(config)
    user = config.copy() if config is not None else GenerationConfig()
    user.update(**kwargs)
    merged = _merge(user, model_defaults, kwargs)
    check_unsupported(merged.extra)
    said = {name for name, value in user.to_dict().items() if value is not None}
    do_sample = bool(merged.do_sample)
    _say_contradictions(merged, said)
    _check_sampling(merged, do_sample)
    _check_answers(merged, do_sample)
    eos = _positive(merged.eos_token_id, "eos_token_id")
    max_new = _max_new_tokens(merged, said, prompt_length, max_positions)
    outputs = _outputs(merged)
    if merged.exponential_decay_length_penalty and not eos:
        needs = "exponential_decay_length_penalty needs it."
        raise bad_argument("eos_token_id", merged.eos_token_id, "a token id", needs)
    return ResolvedGeneration(
        prompt_length=prompt_length,
        max_new_tokens=max_new,
        min_new_tokens=_min_new_tokens(merged, said, prompt_length, max_new),
        max_time=merged.max_time,
        stop_strings=_strings(merged.stop_strings),
        eos_token_ids=eos,
        pad_token_id=_pad(merged, eos, batch_size, has_mask),
        bos_token_id=next(iter(_positive(merged.bos_token_id, "bos_token_id")), None),
        do_sample=do_sample,
        **(_sampling(merged) if do_sample else {}),
        seed=tuple(merged.seed) if isinstance(merged.seed, (list, tuple)) else merged.seed,
        repetition_penalty=_or(merged.repetition_penalty, 1.0),
        presence_penalty=_or(merged.presence_penalty, 0.0),
        frequency_penalty=_or(merged.frequency_penalty, 0.0),
        no_repeat_ngram_size=_or(merged.no_repeat_ngram_size, 0),
        bad_words_ids=tuple(tuple(ids) for ids in merged.bad_words_ids or ()),
        sequence_bias=_bias(merged.sequence_bias),
        suppress_tokens=tuple(merged.suppress_tokens or ()),
        begin_suppress_tokens=tuple(merged.begin_suppress_tokens or ()),
        forced_bos_token_id=merged.forced_bos_token_id,
        forced_eos_token_ids=_positive(merged.forced_eos_token_id, "forced_eos_token_id"),
        exponential_decay_length_penalty=_decay(merged.exponential_decay_length_penalty),
        renormalize_logits=bool(merged.renormalize_logits),
        remove_invalid_values=bool(merged.remove_invalid_values),
        num_beams=_or(merged.num_beams, 1),
        length_penalty=_or(merged.length_penalty, 1.0),
        early_stopping=_or(merged.early_stopping, False),
        prompt_lookup_num_tokens=_or(merged.prompt_lookup_num_tokens, 0),
        num_assistant_tokens=_or(merged.num_assistant_tokens, 5),
        max_matching_ngram_size=_or(merged.max_matching_ngram_size, 3),
        num_return_sequences=_or(merged.num_return_sequences, 1),
        **outputs,
    )


def _merge(user: GenerationConfig, defaults: GenerationConfig | None, kwargs: Mapping[str, Any]) -> GenerationConfig:
    options = {**(defaults.to_diff_dict() if defaults is not None else {}), **user.to_diff_dict()}
    options = {**_DEFAULTS, **options, **kwargs}
    # From parts, because the user may have neutralized an unsupported option of the checkpoint's.
    known = {k: v for k, v in options.items() if k in FIELDS}
    merged = GenerationConfig.from_parts(known, {k: v for k, v in options.items() if k not in known})
    merged.validate()
    return merged


def _say_contradictions(merged: GenerationConfig, said: set[str]) -> None:
    idle = [n for n, neutral in _SAMPLING.items() if n in said and merged.get(n) not in (None, neutral)]
    if idle == ["temperature"] and merged.temperature == 0:
        idle = []  # means greedy, and greedy it is
    if idle and not merged.do_sample:
        given = ", ".join(f"{n}={merged.get(n)!r}" for n in idle)
        notice(f"{given} has no effect without do_sample=True: the likeliest token is taken.", once=True)
    lonely = [n for n, neutral in _BEAMS.items() if n in said and merged.get(n) not in (None, neutral)]
    if lonely and _or(merged.num_beams, 1) == 1:
        given = ", ".join(f"{n}={merged.get(n)!r}" for n in lonely)
        notice(f"{given} has no effect without beam search: set num_beams above 1.", once=True)
    wanted = [n for n in ("output_scores", "output_logits", "output_logprobs") if n in said and merged.get(n)]
    if wanted and not merged.return_dict_in_generate:
        notice(f"{', '.join(wanted)} has no effect without return_dict_in_generate=True.", once=True)


def _check_sampling(merged: GenerationConfig, do_sample: bool) -> None:
    if do_sample and merged.temperature == 0:
        greedy = "For greedy decoding set do_sample=False."
        raise bad_argument("temperature", 0.0, "a number above 0 when sampling", greedy)


def _check_answers(merged: GenerationConfig, do_sample: bool) -> None:
    answers, beams = _or(merged.num_return_sequences, 1), _or(merged.num_beams, 1)
    if beams > 1 and do_sample:
        remedy = "Set do_sample=False, or num_beams=1 with num_return_sequences."
        raise bad_argument("num_beams", beams, "1 with do_sample=True: beams are not drawn at random", remedy)
    if answers > 1 and beams == 1 and not do_sample:
        same = "1 in greedy decoding, whose answers are all the same"
        raise bad_argument("num_return_sequences", answers, same, "Set do_sample=True, or num_beams as high.")
    if answers > beams > 1:
        raise bad_argument("num_return_sequences", answers, f"at most num_beams={beams}", "Set num_beams as high.")


def _sampling(merged: GenerationConfig) -> dict[str, Any]:
    off = {"temperature": 1.0, "top_k": 0, **{k: _SAMPLING[k] for k in _SAMPLING if k not in ("temperature", "top_k")}}
    return {name: _or(merged.get(name), neutral) for name, neutral in off.items()}


def _max_new_tokens(merged: GenerationConfig, said: set[str], prompt_length: int, max_positions: int | None) -> int:
    if merged.max_new_tokens is not None:
        if "max_length" in said:
            wins = f"max_new_tokens={merged.max_new_tokens}"
            notice(f"{wins} wins over max_length={merged.max_length}; set only one of them.", once=True)
        return merged.max_new_tokens
    if merged.max_length is not None:
        if merged.max_length <= prompt_length:
            raise bad_argument(
                "max_length", merged.max_length, f"more than the prompt's {prompt_length} tokens",
                "Set max_new_tokens, which does not count the prompt.",
            )  # fmt: skip
        return merged.max_length - prompt_length
    room = DEFAULT_NEW_TOKENS if max_positions is None else min(DEFAULT_NEW_TOKENS, max_positions - prompt_length)
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt_length} tokens and the model {max_positions} positions, so nothing can be "
            "generated by default. Shorten the prompt, or set max_new_tokens to go past the model's length."
        )
    notice(f"neither max_new_tokens nor max_length is set: at most {room} tokens are generated.", once=True)
    return room


def _min_new_tokens(merged: GenerationConfig, said: set[str], prompt_length: int, max_new: int) -> int:
    if merged.min_new_tokens is None:
        least = max(0, _or(merged.min_length, 0) - prompt_length)
    else:
        least = merged.min_new_tokens
        if "min_length" in said:
            notice(f"min_new_tokens={least} wins over min_length={merged.min_length}; set only one of them.", once=True)
    if least > max_new:
        notice(f"min_new_tokens={least} can't be reached: generation stops after {max_new} tokens.", once=True)
    return least


def _pad(merged: GenerationConfig, eos: tuple[int, ...], batch_size: int, has_mask: bool) -> int | None:
    pad = merged.pad_token_id
    if pad is not None and pad >= 0:
        return pad
    if batch_size > 1 and not has_mask and eos:
        notice(
            f"no attention_mask and no pad_token_id for {batch_size} rows: rows that end early are filled with "
            f"end-of-sequence token {eos[0]}, and padding in the prompts is read as text.",
            once=True,
        )
    return eos[0] if eos else None


def _positive(value: Any, name: str) -> tuple[int, ...]:
    """The ids of an int, a list or None; negative ones, which files use for "none", left out with a notice."""
    if value is None:
        return ()
    ids = tuple(int(i) for i in (value if isinstance(value, (list, tuple)) else (value,)))
    if any(i < 0 for i in ids):
        notice(f"{name}={value!r} holds a negative id, which no token has; it is left out.", once=True)
    return tuple(i for i in ids if i >= 0)


def _strings(value: str | list[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _bias(value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value or ()
    return tuple((tuple(ids), float(bias)) for ids, bias in pairs)


def _decay(value: Any) -> tuple[int, float] | None:
    return None if value is None else (int(value[0]), float(value[1]))


def _outputs(merged: GenerationConfig) -> dict[str, bool]:
    as_object = bool(merged.return_dict_in_generate)
    wanted = {n: as_object and bool(merged.get(n)) for n in ("output_scores", "output_logits", "output_logprobs")}
    return {"return_dict_in_generate": as_object, **wanted}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
