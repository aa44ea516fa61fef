"""How a text pipeline reads its prompts and what it returns: its own options, beside those of `generate`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from cuformers.base.errors import bad_argument
from cuformers.generation.config import GenerationConfig

GENERATE_ARGUMENTS = (
    "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "tokenizer",
    "kv_cache_dtype",
)  # fmt: skip
"""Arguments of `generate` that are no options of GenerationConfig."""

_FORM = ("return_full_text", "return_tensors", "return_text")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of reading prompts and writing answers, with Transformers' names."""

    return_full_text: bool | None = None
    """True (the default) returns the prompt and what follows; False only what follows."""
    return_tensors: bool | None = None
    """True returns token ids (lists of int) instead of text."""
    return_text: bool | None = None
    """True returns text, which is the default; False needs return_tensors=True."""
    clean_up_tokenization_spaces: bool | None = None
    """True (the default) takes out the spaces that WordPiece leaves before punctuation; never done for BPE."""
    skip_special_tokens: bool | None = None
    """True (the default) leaves special tokens out of the text."""
    prefix: str | None = None
    """Put before each text, not before chats; not part of the returned text."""
    handle_long_generation: str | None = None
    """"hole" cuts the start of a prompt off where prompt and answer exceed the tokenizer's model_max_length."""
    stop_sequence: str | None = None
    """Ends the answer at any of this text's tokens, instead of at the model's end-of-text tokens."""
    continue_final_message: bool | None = None
    """Whether a chat's last message is gone on with; by default where its role is "assistant"."""
    add_special_tokens: bool | None = None
    """Whether texts get the tokenizer's special tokens; None: the tokenizer says. Chats have their template's."""
    truncation: bool | str | None = None
    """As of the tokenizer."""
    padding: bool | str | None = None
    """As of the tokenizer."""
    tokenizer_encode_kwargs: Mapping[str, Any] | None = None
    """Further arguments for the tokenizer's call, or for `apply_chat_template` where the prompt is a chat."""
    tools: Sequence[Any] | None = None
    """Tools for the chat template."""
    documents: Sequence[Mapping[str, Any]] | None = None
    """Documents for the chat template."""

    def __post_init__(self) -> None:
        if self.handle_long_generation not in (None, "hole"):
            raise bad_argument("handle_long_generation", self.handle_long_generation, "None or 'hole'")
        given = [name for name in _FORM if getattr(self, name) is not None]
        if len(given) > 1 and not (self.return_tensors is False or given == ["return_tensors", "return_text"]):
            raise ValueError(f"{' and '.join(given)} exclude each other: give one of them.")
        if self.return_text is not None and self.return_text == self.wants_ids:
            raise bad_argument("return_text", self.return_text, "True, or False with return_tensors=True")

    @property
    def wants_ids(self) -> bool:
        """Whether token ids are returned."""
        return bool(self.return_tensors)

    def goes_on(self, by_itself: bool) -> bool:
        """Whether a chat's last message is continued; `by_itself`: where nobody says."""
        return by_itself if self.continue_final_message is None else self.continue_final_message

    def changed(self, options: Mapping[str, Any]) -> "TextOptions":
        """With the options of a call; None leaves a value as it is. What is returned, a call says anew."""
        given = {name: value for name, value in options.items() if value is not None}
        anew = dict.fromkeys(_FORM) if any(name in given for name in _FORM) else {}
        return replace(self, **{**anew, **given})


class Split(NamedTuple):
    """The keyword arguments of a pipeline by whom they are for."""

    text: dict[str, Any]
    """Fields of TextOptions."""
    arguments: dict[str, Any]
    """Arguments of `generate`."""
    generation: dict[str, Any]
    """Options of GenerationConfig."""


_TEXT = frozenset(f.name for f in fields(TextOptions))


def split_options(options: Mapping[str, Any]) -> Split:
    """Sorts keyword arguments.

    Raises:
        ValueError: one is unknown, not supported, or out of its range.
    """
    text = {k: v for k, v in options.items() if k in _TEXT}
    arguments = {k: v for k, v in options.items() if k in GENERATE_ARGUMENTS}
    generation = {k: v for k, v in options.items() if k not in text and k not in arguments}
    GenerationConfig().update(**generation)  # says no now: a stream is generated much later
    return Split(text, arguments, generation)
