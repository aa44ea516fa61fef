"""`AutoTokenizer` and the `Tokenizer` it makes: text to ids and back, over the Rust tokenizers library."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding
from tokenizers import Tokenizer as RustTokenizer

from cuformers.auto.tokenizers import build, encode
from cuformers.auto.tokenizers.batch_encoding import BatchEncoding
from cuformers.auto.tokenizers.encode import Lengths, as_batch, check_side, resolve_lengths
from cuformers.auto.tokenizers.vocabulary import Vocabulary, as_ids
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice

if TYPE_CHECKING:
    import numpy as np
    import torch

    Ids = int | Sequence[int] | Sequence[Sequence[int]] | np.ndarray | torch.Tensor

_CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class AutoTokenizer:
    """Makes the tokenizer of a checkpoint."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        subfolder: str = "",
        **options: Any,
    ) -> "Tokenizer":
        """The tokenizer of a local folder or hub id.

        `options` are those of `build.OPTIONS` (padding_side, truncation_side, model_max_length, special
        tokens such as pad_token, add_bos_token, chat_template ...); each overrides the files. Raises ValueError for
        an unknown option, CheckpointError where the files are missing or can't be read.
        """
        where = {
            "revision": revision,
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
            "subfolder": subfolder,
        }
        return Tokenizer(build.build(pretrained_model_name_or_path, where, options))


class Tokenizer(Vocabulary):
    """One checkpoint's tokenizer. Calls may come from several threads."""

    is_fast = True

    def __init__(self, parts: build.Parts) -> None:
        super().__init__(
            parts.rust, parts.named, parts.extra, add_bos_token=parts.add_bos_token, add_eos_token=parts.add_eos_token
        )
        self._config = parts.config
        self.family = parts.family
        self.name_or_path = parts.name
        self.padding_side = check_side("padding_side", parts.padding_side)
        self.truncation_side = check_side("truncation_side", parts.truncation_side)
        self.model_max_length = parts.model_max_length
        self.model_input_names = list(parts.model_input_names)
        self.clean_up_tokenization_spaces = parts.clean_up_tokenization_spaces
        self.split_special_tokens = parts.split_special_tokens
        self.chat_template = parts.chat_template
        self.pad_token_type_id = 0

    def __call__(
        self,
        text: str | Sequence[Any],
        text_pair: str | Sequence[Any] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        split_special_tokens: bool | None = None,
        verbose: bool = True,
    ) -> BatchEncoding:
        """Encodes a text, a batch of texts, or pairs of them.

        padding: True or "longest", "max_length", False. truncation: True or "longest_first", "only_first",
        "only_second", False; `max_length` alone truncates. With `return_overflowing_tokens` what truncation cuts off
        becomes further rows, each repeating `stride` tokens. return_tensors: None (lists), "pt" or "np" (int64,
        shape [batch, tokens]). Raises ValueError for what is no text and for options that can't be honoured.
        """
        lengths = resolve_lengths(
            padding, truncation, max_length, pad_to_multiple_of, model_max_length=self.model_max_length
        )
        inputs, batched = as_batch(text, text_pair, is_split_into_words)
        split = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        encodings = self._encode(inputs, lengths, add_special_tokens, stride, is_split_into_words, split)
        if lengths.padding:
            self._pad(encodings, lengths, padding_side)
        if return_overflowing_tokens:
            source = [i for i, e in enumerate(encodings) for _ in range(1 + len(e.overflowing))]
            encodings = [part for e in encodings for part in (e, *e.overflowing)]
        if verbose and max_length is None:
            self._note_length(encodings)
        wanted: dict[str, tuple[bool, Callable[[Encoding], Any]]] = {
            "input_ids": (True, lambda e: e.ids),
            "token_type_ids": (self._wants("token_type_ids", return_token_type_ids), lambda e: e.type_ids),
            "attention_mask": (self._wants("attention_mask", return_attention_mask), lambda e: e.attention_mask),
            "special_tokens_mask": (return_special_tokens_mask, lambda e: e.special_tokens_mask),
            "offset_mapping": (return_offsets_mapping, lambda e: e.offsets),
            "length": (return_length, lambda e: len(e.ids)),
        }
        columns: dict[str, Any] = {n: [get(e) for e in encodings] for n, (want, get) in wanted.items() if want}
        if return_overflowing_tokens:
            columns["overflow_to_sample_mapping"] = source
        elif not batched and return_tensors is None:
            columns = {name: rows[0] if isinstance(rows[0], list) else rows for name, rows in columns.items()}
        return BatchEncoding(columns, encodings, return_tensors)

    def encode(self, text: str | Sequence[Any], text_pair: str | Sequence[Any] | None = None, **options: Any) -> Any:
        """The `input_ids` of a call with these options."""
        return self(text, text_pair, **options)["input_ids"]

    def tokenize(
        self, text: str, pair: str | None = None, *, add_special_tokens: bool = False, **options: Any
    ) -> list[str]:
        """The tokens of a text, as the vocabulary spells them."""
        return self(text, pair, add_special_tokens=add_special_tokens, **options).tokens()

    def decode(
        self, token_ids: "Ids", skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> Any:
        """The text of ids (a list, array or tensor, on any device); a list of texts for a batch of them."""
        ids = as_ids(token_ids)
        if ids and isinstance(ids[0], list):
            return [self._decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in ids]
        return self._decode(ids, skip_special_tokens, clean_up_tokenization_spaces)

    def batch_decode(
        self, sequences: "Ids", skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> list[str]:
        """The texts of several sequences of ids."""
        if isinstance(sequences, (list, tuple)):
            sequences = [as_ids(row) for row in sequences]
        texts = self.decode(sequences, skip_special_tokens, clean_up_tokenization_spaces)
        return [texts] if isinstance(texts, str) and len(as_ids(sequences)) else list(texts)

    def pad(
        self,
        encoded_inputs: Any,
        padding: bool | str = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_attention_mask: bool | None = None,
        return_tensors: str | None = None,
        verbose: bool = True,
    ) -> BatchEncoding:
        """Pads what was encoded before: a dict of lists, or a list of dicts, as a data collator has them."""
        lengths = resolve_lengths(
            padding, False, max_length, pad_to_multiple_of, model_max_length=self.model_max_length
        )
        if lengths.padding and self.pad_token_id is None:
            raise ValueError(encode.NO_PAD_TOKEN)
        side = check_side("padding_side", padding_side or self.padding_side)
        padded = encode.pad_dict(self, encoded_inputs, lengths, side, return_attention_mask)
        return padded.convert_to_tensors(return_tensors)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **template_kwargs: Any,
    ) -> Any:
        """Renders one conversation (a list of messages) or several, and encodes them.

        A message is a dict with "role" and "content". tools: JSON schemas, or functions with type hints and a
        docstring. chat_template: a template's name or its source, instead of the tokenizer's. Further arguments are
        the template's variables. Returns a BatchEncoding; its ids alone with return_dict=False; the text with
        tokenize=False. `return_assistant_tokens_mask` adds "assistant_masks": 1 for each token inside the template's
        {% generation %} blocks. Raises ChatTemplateError where the template refuses.
        """
        from cuformers.auto.tokenizers import chat_template as chats

        if return_assistant_tokens_mask and not (tokenize and return_dict):
            raise ValueError("return_assistant_tokens_mask=True needs tokenize=True and return_dict=True.")
        conversations, batched = chats.as_batch(conversation)
        source = chats.choose(self.chat_template, chat_template, has_tools=tools is not None)
        rendered = chats.render(
            source,
            conversations,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            with_spans=return_assistant_tokens_mask,
            variables={**self.special_tokens_map, **template_kwargs},
            asked=template_kwargs,
        )
        if not tokenize:
            return rendered.texts if batched else rendered.texts[0]
        encoded = self(
            rendered.texts if batched else rendered.texts[0],
            add_special_tokens=False,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
            **(tokenizer_kwargs or {}),
        )
        if not return_dict:
            return encoded["input_ids"]
        if return_assistant_tokens_mask:
            masks = [chats.assistant_mask(e, spans) for e, spans in zip(encoded.encodings or (), rendered.spans)]
            encoded["assistant_masks"] = masks if batched or return_tensors else masks[0]
            encoded.convert_to_tensors(return_tensors)
        return encoded

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Any] | None = None) -> str:
        """The source of the template that `apply_chat_template` would use."""
        from cuformers.auto.tokenizers import chat_template as chats

        return chats.choose(self.chat_template, chat_template, has_tools=tools is not None)

    def save_pretrained(self, save_directory: str | Path) -> tuple[str, ...]:
        """Writes the tokenizer's files, each whole or not at all; Transformers reads them back. Returns their paths."""
        from cuformers.auto.tokenizers import save

        return save.save(self, Path(save_directory))

    def __repr__(self) -> str:
        return (
            f"Tokenizer({self.name_or_path!r}, {self.family.name}, {len(self)} tokens, "
            f"model_max_length={self.model_max_length}, padding_side={self.padding_side!r}, "
            f"special_tokens={self.special_tokens_map})"
        )

    def _encode(
        self, inputs: list[Any], lengths: Lengths, specials: bool, stride: int, words: bool, split: bool
    ) -> list[Encoding]:
        with self._lock:
            self._rust.encode_special_tokens = split
            if lengths.truncation is None:
                return self._rust.encode_batch(inputs, is_pretokenized=words, add_special_tokens=specials)
            pairs = any(isinstance(item, tuple) for item in inputs)
            encode.check_truncation(
                lengths, stride, self._rust.num_special_tokens_to_add(pairs) if specials else 0
            )
            try:
                self._rust.enable_truncation(
                    lengths.max_length or 0, stride=stride, strategy=lengths.truncation, direction=self.truncation_side
                )
                return self._rust.encode_batch(inputs, is_pretokenized=words, add_special_tokens=specials)
            except BaseException as error:
                raise encode.truncation_error(error, lengths, stride) from error
            finally:
                self._rust.no_truncation()

    def _pad(self, encodings: list[Encoding], lengths: Lengths, side: str | None) -> None:
        if self.pad_token_id is None or self.pad_token is None:
            raise ValueError(encode.NO_PAD_TOKEN)
        length = lengths.padded([len(encoding.ids) for encoding in encodings])
        direction = check_side("padding_side", side or self.padding_side)
        for encoding in encodings:
            encoding.pad(
                length,
                direction=direction,
                pad_id=self.pad_token_id,
                pad_type_id=self.pad_token_type_id,
                pad_token=self.pad_token,
            )

    def _wants(self, name: str, asked: bool | None) -> bool:
        return name in self.model_input_names if asked is None else asked

    def _note_length(self, encodings: list[Encoding]) -> None:
        longest = max((len(encoding.ids) for encoding in encodings), default=0)
        if longest > self.model_max_length > 0:
            limit = self.model_max_length
            notice(f"a text has {longest} tokens, more than this tokenizer's model_max_length={limit}", once=True)

    def _decode(self, ids: list[int], skip_special_tokens: bool, clean_up: bool | None) -> str:
        if any(i < 0 for i in ids):
            raise bad_argument("token_ids", min(ids), "ids from 0 up", "Replace a label's -100 before decoding.")
        with self._lock:
            text = self._rust.decode(ids, skip_special_tokens=skip_special_tokens)
        asked = self.clean_up_tokenization_spaces if clean_up is None else clean_up
        return clean_up_spaces(text) if cleans_up(self._rust, asked) else text


def cleans_up(rust: RustTokenizer, asked: bool) -> bool:
    """Not for BPE, as in Transformers 5: it would take spaces out of the text itself."""
    return asked and type(rust.model).__name__ != "BPE"


def clean_up_spaces(text: str) -> str:
    """Takes out the spaces that WordPiece's decoding leaves before punctuation and inside contractions."""
    for found in _CLEAN_UP:
        text = text.replace(found, found.strip())
    return text
