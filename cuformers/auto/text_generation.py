"""TextGenerationPipeline: texts and chats in, texts and chats out, behind Transformers' interface."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuformers.auto.model import PreTrainedModel
from cuformers.auto.pipeline_defaults import call_config, start_config
from cuformers.auto.pipeline_inputs import Chat, Prompt, batches, read_inputs
from cuformers.auto.pipeline_options import Split, TextOptions, split_options
from cuformers.auto.tokenizer import Tokenizer
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.generation.config import GenerationConfig

Record = dict[str, Any]
"""{"generated_text": ...} or {"generated_token_ids": ...}."""


class _Encoded(NamedTuple):
    """One prompt as tokens."""

    ids: list[int]
    mask: list[int]
    """1 for real tokens."""


class _Call(NamedTuple):
    """One call's options, complete."""

    text: TextOptions
    split: Split
    config: GenerationConfig
    batch_size: int


class TextGenerationPipeline:
    """Continues texts and answers chats.

    Unless the checkpoint's generation_config.json or the caller says otherwise it generates up to 256 tokens, drawn at
    temperature 0.7. Options come from the call, then from the pipeline's making, then from the checkpoint, then from
    these defaults. A generation_config passed to a call replaces what the pipeline was made with, and the defaults.

    Args:
        model, tokenizer: what computes; they must belong together.
        batch_size: prompts that are generated at once; the answers do not depend on it. Default 1.
        options: of TextOptions, arguments of `generate`, and fields of GenerationConfig.

    Raises:
        ValueError: an unknown option, or a value that is not possible.
    """

    task = "text-generation"

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, *, batch_size: int | None = None, **options: Any
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.batch_size = _batch_size(batch_size)
        split = split_options(_without_workers(options))
        user = split.arguments.pop("generation_config", None)
        self._text = TextOptions().changed(split.text)
        self._arguments = split.arguments
        start = start_config(user, model.generation_config, split.generation, tokenizer.pad_token_id)
        self.generation_config = start.config
        self._filled = start.filled

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights."""
        return self.model.dtype

    def __repr__(self) -> str:
        return f"TextGenerationPipeline({self.model.name_or_path!r}, {self.dtype}, {self.device})"

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes the model and the tokenizer into one folder."""
        self.model.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(save_directory)

    def __call__(self, text_inputs: Any, *, batch_size: int | None = None, **options: Any) -> Any:
        """Continues prompts.

        Args:
            text_inputs: a string; a chat, which is a list of messages {"role": ..., "content": ...}; a list of these;
                or a generator, iterable or torch Dataset of these, whose answers are made as they are asked for.
            batch_size: prompts that are generated at once.
            options: as of the class.

        Returns:
            For one prompt a list with a record {"generated_text": text, or the chat with the answer} for each of
            num_return_sequences answers; for a list of prompts a list of such lists; for a stream an iterator over
            them. With return_tensors=True the records are {"generated_token_ids": prompt and answer}; with
            return_dict_in_generate=True they also hold what the output_ options ask for, as nested lists.

        Raises:
            ValueError: an unknown or impossible option, or a prompt that is neither text nor chat.
        """
        split = split_options(_without_workers(options))
        text = self._text.changed(split.text)
        config = split.arguments.pop("generation_config", None) or call_config(
            self.generation_config, self.model.generation_config, split.generation, self._filled
        )
        split = split._replace(arguments={**self._arguments, **split.arguments})
        call = _Call(text, split, config, _batch_size(batch_size or self.batch_size))
        inputs = read_inputs(text_inputs)
        answers = self._stream(inputs.prompts, call)
        if inputs.form == "stream":
            return answers
        return list(answers) if inputs.form == "list" else next(answers)

    def _stream(self, prompts: Iterable[Prompt], call: _Call) -> Iterator[list[Record]]:
        return chain.from_iterable(self._run(batch, call) for batch in batches(prompts, call.batch_size))

    def _run(self, prompts: list[Prompt], call: _Call) -> Iterator[list[Record]]:
        options = {**call.split.generation, **self._for_stop_sequence(call.text)}
        rows = [self._shortened(self._encode(p, call, options), call, options) for p in prompts]
        width = max(len(row.ids) for row in rows)
        ids, mask = self._padded(rows, width, call.config)
        output = self.model.generate(
            ids,
            call.config,
            attention_mask=mask,
            **{"tokenizer": self.tokenizer, **call.split.arguments},
            **self._with_prefix(options, call),
        )
        sequences, extras = _opened(output)
        count = sequences.shape[0] // len(prompts)
        for index, prompt in enumerate(prompts):
            own = range(index * count, (index + 1) * count)
            yield [self._record(prompt, sequences[i].tolist(), width, call.text, _row(extras, i)) for i in own]

    # -- reading -----------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt, call: _Call, options: Mapping[str, Any]) -> _Encoded:
        text = call.text
        given = {
            "add_special_tokens": text.add_special_tokens,
            "truncation": text.truncation,
            "padding": text.padding,
            "max_length": options.get("max_length"),
        }
        given = {k: v for k, v in given.items() if v is not None} | dict(text.tokenizer_encode_kwargs or {})
        if isinstance(prompt, Chat):
            given.pop("add_special_tokens", None)
            goes_on = self._goes_on(prompt, text)
            encoded = self.tokenizer.apply_chat_template(
                prompt.messages,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                tools=text.tools,
                documents=text.documents,
                **given,
            )
        else:
            encoded = self.tokenizer((text.prefix or "") + prompt, **given)
        ids = encoded["input_ids"]
        return self._started(ids, encoded.get("attention_mask", [1] * len(ids)))

    def _started(self, ids: list[int], mask: list[int]) -> _Encoded:
        """A prompt without tokens starts from the beginning-of-text token."""
        bos = self.generation_config.bos_token_id
        start = bos[0] if isinstance(bos, list) else bos
        return _Encoded(ids, mask) if ids or start is None else _Encoded([start], [1])

    def _shortened(self, row: _Encoded, call: _Call, options: Mapping[str, Any]) -> _Encoded:
        """Cuts the start of a prompt off, where handle_long_generation asks for it."""
        limit, length = self.tokenizer.model_max_length, len(row.ids)
        if call.text.handle_long_generation is None:
            return row
        new = self._effective("max_new_tokens", call, options)
        if new is None:
            new = (self._effective("max_length", call, options) or 0) - length
        if length + max(new, 1) <= limit:
            return row
        keep = limit - max(new, 1)
        if keep <= 0:
            remedy = "handle_long_generation='hole' keeps room for the answer within it."
            raise bad_argument("max_new_tokens", new, f"less than the tokenizer's model_max_length={limit}", remedy)
        return _Encoded(row.ids[-keep:], row.mask[-keep:])

    def _padded(self, rows: list[_Encoded], width: int, config: GenerationConfig) -> tuple[Tensor, Tensor]:
        """[B, width] tokens and mask, padded on the left; the engine takes the padding out again."""
        pad = next((p for p in (config.pad_token_id, self.tokenizer.pad_token_id) if p is not None and p >= 0), 0)
        ids = [[pad] * (width - len(row.ids)) + row.ids for row in rows]
        mask = [[0] * (width - len(row.ids)) + row.mask for row in rows]
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.int64)

    def _for_stop_sequence(self, text: TextOptions) -> dict[str, Any]:
        if text.stop_sequence is None:
            return {}
        ids = self.tokenizer.encode(text.stop_sequence, add_special_tokens=False)
        if len(ids) > 1:
            tokens = self.tokenizer.convert_ids_to_tokens(ids)
            notice(
                f"stop_sequence={text.stop_sequence!r} has {len(ids)} tokens, any of which ends the answer: {tokens}; "
                "stop_strings= ends it at the whole text.",
                once=True,
            )
        return {"eos_token_id": ids}

    def _with_prefix(self, options: Mapping[str, Any], call: _Call) -> dict[str, Any]:
        """Lengths that count the prompt count the prefix on top."""
        changed = dict(options)
        if call.text.prefix:
            extra = len(self.tokenizer.encode(call.text.prefix, add_special_tokens=bool(call.text.add_special_tokens)))
            for total, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
                length = self._effective(total, call, options)
                if length is not None and self._effective(new, call, options) is None:
                    changed[total] = length + extra
        return changed

    def _effective(self, name: str, call: _Call, options: Mapping[str, Any]) -> Any:
        """An option's value in this call."""
        if name in options:
            return options[name]
        value = call.config.get(name)
        return self.model.generation_config.get(name) if value is None else value

    # -- writing -----------------------------------------------------------------------------------------------------

    def _record(self, prompt: Prompt, sequence: list[int], width: int, text: TextOptions, extras: Record) -> Record:
        if text.wants_ids:
            return {"generated_token_ids": sequence, **extras}
        answer = self.tokenizer.decode(
            sequence[width:],
            skip_special_tokens=text.skip_special_tokens is not False,
            clean_up_tokenization_spaces=text.clean_up_tokenization_spaces is not False,
        )
        if text.return_full_text is False:
            return {"generated_text": answer, **extras}
        if isinstance(prompt, str):
            return {"generated_text": prompt + answer, **extras}
        *before, last = prompt.messages
        if self._goes_on(prompt, text):
            whole = {"role": last["role"], "content": last["content"] + answer}
            return {"generated_text": [*before, whole], **extras}
        return {"generated_text": [*prompt.messages, {"role": "assistant", "content": answer}], **extras}

    @staticmethod
    def _goes_on(chat: Chat, text: TextOptions) -> bool:
        return chat.continues if text.continue_final_message is None else text.continue_final_message


def _opened(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The sequences, and what else was asked for, with a row for each sequence."""
    if isinstance(output, Tensor):
        return output.cpu(), {}
    extras = {}
    for name, value in output.items():
        if name != "sequences":
            extras[name] = (torch.stack(value, dim=1) if isinstance(value, tuple) else value).cpu()
    return output.sequences.cpu(), extras


def _row(extras: dict[str, Tensor], index: int) -> Record:
    return {name: value[index].tolist() for name, value in extras.items()}


def _batch_size(value: int | None) -> int:
    value = 1 if value is None else value
    if not isinstance(value, int) or value < 1:
        raise bad_argument("batch_size", value, "an integer from 1")
    return value


def _without_workers(options: Mapping[str, Any]) -> dict[str, Any]:
    if options.get("num_workers"):
        notice("num_workers has no effect: prompts are tokenized in this process.", once=True)
    return {k: v for k, v in options.items() if k != "num_workers"}
