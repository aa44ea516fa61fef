"""From the prompts of a pipeline's call to tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuformers.auto.pipelines.inputs import Chat, Prompt
from cuformers.auto.pipelines.options import TextOptions
from cuformers.auto.tokenizers.tokenizer import Tokenizer
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.generation.config import GenerationConfig


class Encoded(NamedTuple):
    """One prompt as tokens."""

    ids: list[int]
    mask: list[int]
    """1 for real tokens."""


@dataclass(frozen=True, kw_only=True)
class PromptReader:
    """Reads the prompts of one call."""

    tokenizer: Tokenizer
    """What makes tokens."""
    text: TextOptions
    """How."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of GenerationConfig that the call gives by name."""
    configs: Sequence[GenerationConfig] = ()
    """Where to look for the others, in this order."""

    def read(self, prompt: Prompt) -> Encoded:
        """The tokens of a prompt; without any it starts from the beginning-of-text token."""
        given = {
            "add_special_tokens": self.text.add_special_tokens,
            "truncation": self.text.truncation,
            "padding": self.text.padding,
            "max_length": self.options.get("max_length"),
        }
        given = {k: v for k, v in given.items() if v is not None} | dict(self.text.tokenizer_encode_kwargs or {})
        if isinstance(prompt, Chat):
            encoded = self._read_chat(prompt, given)
        else:
            encoded = self.tokenizer((self.text.prefix or "") + prompt, **given)
        ids = encoded["input_ids"]
        bos = self.value("bos_token_id")
        if not ids and bos is not None:
            ids = [bos[0] if isinstance(bos, list) else bos]
            return Encoded(ids, [1])
        return self._shortened(Encoded(ids, encoded.get("attention_mask", [1] * len(ids))))

    def _read_chat(self, chat: Chat, given: dict[str, Any]) -> Any:
        given.pop("add_special_tokens", None)
        goes_on = self.text.goes_on(chat.continues)
        return self.tokenizer.apply_chat_template(
            chat.messages,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            tools=self.text.tools,
            documents=self.text.documents,
            **given,
        )

    def padded(self, rows: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
        """[B, width] tokens and mask, padded on the left; the engine takes the padding out again."""
        width = max(len(row.ids) for row in rows)
        pads = (self.value("pad_token_id"), self.tokenizer.pad_token_id)
        pad = next((p for p in pads if p is not None and p >= 0), 0)
        ids = [[pad] * (width - len(row.ids)) + row.ids for row in rows]
        mask = [[0] * (width - len(row.ids)) + row.mask for row in rows]
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.int64)

    def generation_options(self) -> dict[str, Any]:
        """The call's options, with what stop_sequence and prefix make of them."""
        changed = dict(self.options)
        if self.text.stop_sequence is not None:
            changed["eos_token_id"] = self._stop_tokens(self.text.stop_sequence)
        if self.text.prefix:
            specials = bool(self.text.add_special_tokens)
            extra = len(self.tokenizer.encode(self.text.prefix, add_special_tokens=specials))
            for total, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
                length = self.value(total)
                if length is not None and self.value(new) is None:
                    changed[total] = length + extra
        return changed

    def value(self, name: str) -> Any:
        """An option's value in this call; None where it is unset."""
        if name in self.options:
            return self.options[name]
        return next((value for config in self.configs if (value := config.get(name)) is not None), None)

    def _shortened(self, row: Encoded) -> Encoded:
        """Cuts the start of a prompt off, where handle_long_generation asks for it."""
        if self.text.handle_long_generation is None:
            return row
        limit, length = self.tokenizer.model_max_length, len(row.ids)
        new = self.value("max_new_tokens")
        new = max(1, (self.value("max_length") or 0) - length if new is None else new)
        if length + new <= limit:
            return row
        if new >= limit:
            remedy = "handle_long_generation='hole' keeps room for the answer within it."
            raise bad_argument("max_new_tokens", new, f"less than the tokenizer's model_max_length={limit}", remedy)
        keep = limit - new
        return Encoded(row.ids[-keep:], row.mask[-keep:])

    def _stop_tokens(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > 1:
            tokens = self.tokenizer.convert_ids_to_tokens(ids)
            notice(
                f"stop_sequence={text!r} has {len(ids)} tokens, any of which ends the answer: {tokens}; "
                "stop_strings= ends it at the whole text.",
                once=True,
            )
        return ids
