"""GenerationConfig: what a user or a checkpoint asks of `generate`, with Transformers' names and file format."""

import copy as copying
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from os import PathLike
from typing import Any

from cuformers.base.errors import CheckpointError, bad_argument
from cuformers.checkpoint.json_file import read_json
from cuformers.generation import checks, config_file
from cuformers.generation.unsupported import ARGUMENTS, METADATA, UNSUPPORTED, check_unsupported


@dataclass(init=False)
class GenerationConfig:
    """Options of `generate`. A field that is None is unset: the checkpoint's value counts, then the default.

    Unlike other configs here it is mutable, because users write `model.generation_config.max_new_tokens = 5`;
    every way of setting a field checks its name, and `validate()` checks the values. Options of Transformers that
    are not listed here are accepted at their neutral value and refused otherwise (see unsupported.py).

    Raises:
        ValueError: an unknown option, or a value out of its range.
    """

    max_length: int | None = None
    """Most tokens of prompt and answer together; max_new_tokens wins over it. Default: the prompt and 20 more."""
    max_new_tokens: int | None = None
    """Most tokens to generate."""
    min_length: int | None = None
    """Fewest tokens of prompt and answer together before an end-of-sequence token is allowed. Default 0."""
    min_new_tokens: int | None = None
    """Fewest tokens to generate before an end-of-sequence token is allowed; wins over min_length."""
    max_time: float | None = None
    """Seconds after which generation stops at the next token."""
    stop_strings: str | list[str] | None = None
    """Strings that end the generation when the text contains them; the text keeps the one that matched."""
    do_sample: bool | None = None
    """True draws each token at random; False takes the likeliest. Default False."""
    temperature: float | None = None
    """Divides the logits before drawing: below 1 is more conservative. Default 1."""
    top_k: int | None = None
    """Draws only from the k likeliest tokens; 0 switches it off. Default 50."""
    top_p: float | None = None
    """Draws only from the smallest set of likeliest tokens whose probabilities sum up to this. Default 1 (off)."""
    min_p: float | None = None
    """Draws only from tokens at least this fraction as likely as the likeliest. Default off."""
    top_h: float | None = None
    """Draws only from the likeliest tokens that hold this fraction of the distribution's entropy. Default off."""
    typical_p: float | None = None
    """Draws only from the most locally typical tokens that sum up to this probability. Default 1 (off)."""
    epsilon_cutoff: float | None = None
    """Draws only from tokens of at least this probability. Default 0 (off)."""
    eta_cutoff: float | None = None
    """Like epsilon_cutoff, with a cutoff that sinks where the distribution is flat. Default 0 (off)."""
    seed: int | list[int] | None = None
    """Makes the draws repeatable: one seed for the call, or one for each row. None draws it from torch's generator."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens seen in prompt or answer. Default 1 (off)."""
    presence_penalty: float | None = None
    """Subtracted from the logit of every token generated so far (OpenAI's meaning). Default 0."""
    frequency_penalty: float | None = None
    """Subtracted from a token's logit once for each time it was generated (OpenAI's meaning). Default 0."""
    no_repeat_ngram_size: int | None = None
    """No run of this many tokens occurs twice. Default 0 (off)."""
    bad_words_ids: list[list[int]] | None = None
    """Token sequences that must not be generated."""
    sequence_bias: Mapping[tuple[int, ...], float] | list | None = None
    """Added to the logit of a sequence's last token when the rest precedes it: {(ids): bias} or [[[ids], bias]]."""
    suppress_tokens: list[int] | None = None
    """Tokens that must not be generated."""
    begin_suppress_tokens: list[int] | None = None
    """Tokens that must not be generated first."""
    forced_bos_token_id: int | None = None
    """Token to force after a prompt of one token."""
    forced_eos_token_id: int | list[int] | None = None
    """Token, or one of these tokens, to force at the last place that max_length allows."""
    exponential_decay_length_penalty: tuple[int, float] | None = None
    """(start, factor): from `start` generated tokens on, end-of-sequence grows likelier by `factor` per token."""
    renormalize_logits: bool | None = None
    """True returns scores as log-probabilities. Default False."""
    remove_invalid_values: bool | None = None
    """True replaces nan and infinite logits. Default False."""
    num_beams: int | None = None
    """Beams of each prompt: beam search keeps so many likeliest continuations. Default 1: no beam search."""
    length_penalty: float | None = None
    """Beam search divides an answer's log-probability by its length to this power: above 0 long answers gain.
    Default 1."""
    early_stopping: bool | str | None = None
    """When beam search ends. True: with num_beams answers. False: when going on hardly finds better ones, judged by the
    present length. "never": when it can't, judged by the longest length that helps. Default False."""
    prompt_lookup_num_tokens: int | None = None
    """Tokens to guess in each step, as those that followed the last place where the newest tokens stood before, and to
    check: the same answer, sooner where it repeats itself or the prompt. Default: none."""
    num_assistant_tokens: int | None = None
    """Tokens that an assistant_model guesses in each step. Default 5."""
    max_matching_ngram_size: int | None = None
    """Newest tokens that prompt lookup looks for, at the most. Default 3."""
    num_return_sequences: int | None = None
    """Answers per prompt; more than one needs do_sample=True, or as many beams. Default 1."""
    return_dict_in_generate: bool | None = None
    """True returns an object with `sequences` and what the output_ options ask for. Default False: the tokens."""
    output_scores: bool | None = None
    """Also return the processed logits that each token was chosen from. Default False."""
    output_logits: bool | None = None
    """Also return the model's raw logits for each token. Default False."""
    output_logprobs: bool | None = None
    """Also return the log-probability of each generated token under the model's raw logits. Default False."""
    pad_token_id: int | None = None
    """Fills rows that ended early. Default: the first end-of-sequence token."""
    bos_token_id: int | None = None
    """The begin-of-sequence token, which starts an empty prompt."""
    eos_token_id: int | list[int] | None = None
    """The token, or tokens, that end a sequence."""

    def __init__(self, **options: Any) -> None:
        self._extra: dict[str, Any] = {}
        for name in FIELDS:
            setattr(self, name, None)
        self._set(options)
        self.validate()

    def __setattr__(self, name: str, value: object) -> None:
        if name in UNSUPPORTED:
            check_unsupported({name: value})
            self._extra[name] = value
        elif name in FIELDS or name == "_extra":
            super().__setattr__(name, value)
        else:
            raise unknown_option(name)

    def __getattr__(self, name: str) -> Any:
        # Only reached where no field has the name; an unsupported option is None unless a file set it.
        if name in UNSUPPORTED:
            return self._extra.get(name)
        raise AttributeError(f"GenerationConfig has no option {name!r}.{close_options(name)}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GenerationConfig) and self._options() == other._options()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.to_diff_dict().items())
        return f"GenerationConfig({given})"

    def __deepcopy__(self, memo: dict) -> "GenerationConfig":
        return self.from_parts(copying.deepcopy(self._options(), memo), copying.deepcopy(self._extra, memo))

    def validate(self) -> None:
        """Checks every value that is set.

        Raises:
            ValueError: naming the option, its value, what is allowed, and the remedy.
        """
        checks.check_values(self._options())

    def update(self, *, defaults_only: bool = False, **options: Any) -> dict[str, Any]:
        """Sets options; all are set, or none when one is refused. With `defaults_only`, only those that are unset.

        Returns:
            An empty dict, which stands for the unused options that Transformers returns here.

        Raises:
            ValueError: an unknown option or a bad value.
        """
        changed = self.copy()
        changed._set({k: v for k, v in options.items() if not (defaults_only and changed.get(k) is not None)})
        changed.validate()
        self.__dict__.update(changed.__dict__)
        return {}

    def copy(self, **overrides: Any) -> "GenerationConfig":
        """A config with the same options and the overrides set."""
        made = copying.deepcopy(self)
        if overrides:
            made.update(**overrides)
        return made

    def get(self, name: str) -> Any:
        """The value of an option by name; None where it is unset.

        Raises:
            ValueError: there is no such option.
        """
        if name not in FIELDS and name not in UNSUPPORTED:
            raise unknown_option(name)
        return getattr(self, name)

    @property
    def extra(self) -> Mapping[str, Any]:
        """Keys that a file had and that are no option here; they are written back by `save_pretrained`."""
        return self._extra

    def to_dict(self) -> dict[str, Any]:
        """All options, unset ones too, and the keys of the file it came from that are no option here."""
        return {**self._options(), **self._extra}

    def to_diff_dict(self) -> dict[str, Any]:
        """The options that are set, and the file's other keys."""
        return {name: value for name, value in self.to_dict().items() if value is not None}

    @classmethod
    def from_parts(cls, known: Mapping[str, Any], extra: Mapping[str, Any]) -> "GenerationConfig":
        """A config of supported options and of others, which are kept unchecked; `validate` checks the former."""
        made = cls()
        made._set(known)
        made._extra.update(extra)
        return made

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], **overrides: Any) -> "GenerationConfig":
        """A config from the contents of a generation_config.json.

        A key that is no option of Transformers 5.17 or of ours is reported, and kept so that saving writes it back.
        Unsupported options are kept too, and refused by `generate` unless it is given their neutral value.
        """
        known = {name: config_file.from_json(name, options[name]) for name in FIELDS if name in options}
        extra = {name: value for name, value in options.items() if name not in FIELDS}
        config_file.report_unknown([k for k in extra if k not in UNSUPPORTED and k not in METADATA])
        made = cls.from_parts(known, extra)
        made.validate()
        return made.copy(**overrides)

    @classmethod
    def from_model_config(cls, config: Mapping[str, Any]) -> "GenerationConfig":
        """Defaults for a checkpoint without generation_config.json: what its config.json (as a dict) says of ours."""
        inner = next((config[k] for k in ("decoder", "generator", "text_config") if config.get(k)), {})
        found = {**inner, **{k: v for k, v in config.items() if v is not None}}
        return cls.from_dict({name: found[name] for name in FIELDS if found.get(name) is not None})

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name: str | PathLike, config_file_name: str | None = None, **options: Any
    ) -> "GenerationConfig":
        """Reads generation_config.json from a folder or a hub repository.

        Args:
            pretrained_model_name: a folder, or a hub id.
            config_file_name: another name of the file.
            options: cache_dir, local_files_only, revision, subfolder and token say where to look;
                the others override what the file says.

        Raises:
            FileNotFoundError: there is no such file; the message says how to make one.
            CheckpointError: the file is not a JSON object, or holds a value out of range.
        """
        where = {name: options.pop(name) for name in config_file.WHERE if name in options}
        path = config_file.locate(pretrained_model_name, config_file_name or config_file.FILE_NAME, **where)
        try:
            made = cls.from_dict(read_json(path))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        made.update(**options)
        return made

    def save_pretrained(self, save_directory: str | PathLike, config_file_name: str | None = None) -> None:
        """Writes the options that are set to generation_config.json, in one step, in Transformers' format."""
        self.validate()
        config_file.write(save_directory, config_file_name or config_file.FILE_NAME, self.to_diff_dict())

    def _set(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            setattr(self, name, value)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELDS}


FIELDS: tuple[str, ...] = tuple(f.name for f in fields(GenerationConfig))
"""Names of the options that are supported, in the order of their definition."""


def check_config(value: Any) -> None:
    """Raises ValueError for what was passed as generation_config and is neither None nor one of ours."""
    if value is not None and not isinstance(value, GenerationConfig):
        remedy = "Of Transformers' make one with cuformers.GenerationConfig.from_dict(config.to_diff_dict())."
        raise bad_argument("generation_config", value, "a cuformers.GenerationConfig or None", remedy)


def close_options(name: str) -> str:
    """A sentence that names the options spelled like `name`; empty where there is none."""
    near = get_close_matches(name, (*FIELDS, *UNSUPPORTED), n=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def unknown_option(name: str) -> ValueError:
    """The error for an option that does not exist."""
    if name in ARGUMENTS:
        return ValueError(f"{name!r} is not an option of GenerationConfig. {ARGUMENTS[name]}")
    hint = close_options(name) or f" The options are: {', '.join(FIELDS)}."
    return ValueError(f"{name!r} is not an option of generate.{hint}")
