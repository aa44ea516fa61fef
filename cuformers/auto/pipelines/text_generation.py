"""TextGenerationPipeline: texts and chats in, texts and chats out, behind Transformers' interface."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuformers.auto.model import PreTrainedModel
from cuformers.auto.pipelines.base import BasePipeline
from cuformers.auto.pipelines.defaults import call_config, start_config
from cuformers.auto.pipelines.inputs import Prompt, batches, read_inputs
from cuformers.auto.pipelines.options import TextOptions, split_options
from cuformers.auto.pipelines.reader import PromptReader
from cuformers.auto.tokenizers.tokenizer import Tokenizer
from cuformers.base.log import notice
from cuformers.generation.config import GenerationConfig

Record = dict[str, Any]
"""{"generated_text": ...} or {"generated_token_ids": ...}."""


class _Call(NamedTuple):
    """One call, its options complete."""

    reader: PromptReader
    config: GenerationConfig
    arguments: dict[str, Any]
    """Further ones of `generate`."""


class TextGenerationPipeline(BasePipeline[PreTrainedModel]):
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
        super().__init__(model, tokenizer, batch_size)
        tokenizer.padding_side = "left"  # as Transformers' pipelines do; for padding= and for the user's own calls
        split = split_options(_without_workers(options))
        user = split.arguments.pop("generation_config", None)
        self._text = TextOptions().changed(split.text)
        self._arguments = split.arguments
        start = start_config(user, model.generation_config, split.generation, tokenizer.pad_token_id)
        self.generation_config = start.config
        self._filled = start.filled

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
            return_dict_in_generate=True they also hold what the output_ options ask for of each answer, as nested
            lists.

        Raises:
            ValueError: an unknown or impossible option, or a prompt that is neither text nor chat.
        """
        split = split_options(_without_workers(options))
        made_with = self.model.generation_config
        config = split.arguments.pop("generation_config", None) or call_config(
            self.generation_config, made_with, split.generation, self._filled
        )
        reader = PromptReader(
            tokenizer=self.tokenizer,
            text=self._text.changed(split.text),
            options=split.generation,
            configs=(config, made_with),
        )
        arguments = {"tokenizer": self.tokenizer, **self._arguments, **split.arguments}
        call = _Call(reader, config, arguments)
        size = self._size(batch_size)
        inputs = read_inputs(text_inputs)
        answers = self._stream(inputs.prompts, call, size)
        if inputs.form == "stream":
            return answers
        return list(answers) if inputs.form == "list" else next(answers)

    def _stream(self, prompts: Iterable[Prompt], call: _Call, size: int) -> Iterator[list[Record]]:
        return chain.from_iterable(self._run(batch, call) for batch in batches(prompts, size))

    def _run(self, prompts: list[Prompt], call: _Call) -> Iterator[list[Record]]:
        reader = call.reader
        ids, mask = reader.padded([reader.read(prompt) for prompt in prompts])
        options = {**call.arguments, **reader.generation_options()}
        sequences, extras = _opened(self.model.generate(ids, call.config, attention_mask=mask, **options))
        count, width = sequences.shape[0] // len(prompts), ids.shape[1]
        for index, prompt in enumerate(prompts):
            own = range(index * count, (index + 1) * count)
            yield [self._record(prompt, sequences[i].tolist(), width, reader.text, _row(extras, i)) for i in own]

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
        if text.goes_on(prompt.continues):
            whole = {"role": last["role"], "content": last["content"] + answer}
            return {"generated_text": [*before, whole], **extras}
        return {"generated_text": [*prompt.messages, {"role": "assistant", "content": answer}], **extras}


def _opened(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The sequences, and what else was asked for, with a row for each sequence."""
    if isinstance(output, Tensor):
        return output.cpu(), {}
    extras = dict(output.items())
    sequences, beams = extras.pop("sequences"), extras.pop("beam_indices", None)
    for name, value in extras.items():
        extras[name] = (_by_sequence(value, beams) if isinstance(value, tuple) else value).cpu()
    return sequences.cpu(), extras


def _by_sequence(steps: tuple[Tensor, ...], beams: Tensor | None) -> Tensor:
    """[N, S, V] of each step's [rows, V]; in beam search `beams` [N, S] names a sequence's row of each step."""
    if beams is not None:
        columns = beams.to(steps[0].device).T
        steps = tuple(x[row.clamp(min=0)].masked_fill(row[:, None] < 0, 0.0) for x, row in zip(steps, columns))
    return torch.stack(steps, dim=1)


def _row(extras: dict[str, Tensor], index: int) -> Record:
    return {name: value[index].tolist() for name, value in extras.items()}


def _without_workers(options: Mapping[str, Any]) -> dict[str, Any]:
    if options.get("num_workers"):
        notice("num_workers has no effect: prompts are tokenized in this process.", once=True)
    return {k: v for k, v in options.items() if k != "num_workers"}
