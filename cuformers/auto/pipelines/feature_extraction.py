"""`pipeline("feature-extraction")`: the vectors of a text's tokens, or one vector of the text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cuformers.auto.base_model import BaseModel
from cuformers.auto.pipelines.base import BasePipeline
from cuformers.auto.pipelines.inputs import batches, read_inputs
from cuformers.auto.pipelines.sentence import POOLINGS, Sentence, read_sentence
from cuformers.auto.tokenizers.tokenizer import Tokenizer
from cuformers.base.errors import bad_argument

AUTO = "auto"
_TOKENIZE = ("add_special_tokens", "truncation", "max_length", "split_special_tokens")


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """Options of feature extraction; the first three are Transformers'."""

    return_tensors: bool | None = None
    """True returns tensors on the CPU instead of nested lists."""
    truncation: bool | str | None = None
    """True cuts texts off at the model's length; otherwise a longer one is an error where positions are learned."""
    tokenize_kwargs: Mapping[str, Any] | None = None
    """Further arguments of the tokenizer's call: add_special_tokens, truncation, max_length, split_special_tokens."""
    pooling: str | None = None
    """None returns a vector for each token. "mean", "cls" (the first token's) or "last" return one for each text;
    "auto" as the checkpoint's modules.json says, which truncates and normalises as that says too."""
    normalize: bool | None = None
    """Whether pooled vectors have length 1; None: with "auto" as the checkpoint says, else no."""

    def __post_init__(self) -> None:
        if self.pooling not in (None, AUTO, *POOLINGS):
            raise bad_argument("pooling", self.pooling, f"None, {AUTO!r}, or one of {list(POOLINGS)}")
        if self.normalize and self.pooling is None:
            raise bad_argument("normalize", True, "nothing without pooling", "Give pooling='mean', 'cls' or 'last'.")
        given = self.tokenize_kwargs or {}
        odd = next((name for name in given if name not in _TOKENIZE), None)
        if odd is not None:
            raise bad_argument(f"tokenize_kwargs[{odd!r}]", given[odd], f"only {', '.join(_TOKENIZE)}")
        if self.truncation is not None and "truncation" in given:
            raise ValueError("truncation is given by itself and in tokenize_kwargs: give it in one place.")

    def changed(self, options: Mapping[str, Any]) -> "FeatureOptions":
        """With the options of a call.

        Raises:
            ValueError: one is unknown or not possible.
        """
        known = [f.name for f in fields(self)]
        odd = next((name for name in options if name not in known), None)
        if odd is not None:
            raise bad_argument(odd, options[odd], "nothing", f"This pipeline's options are {', '.join(known)}.")
        return replace(self, **options)


class FeatureExtractionPipeline(BasePipeline[BaseModel]):
    """Turns texts into vectors: the model's last hidden states, of each token or pooled.

    Padding is never part of a result, and a text's vectors do not depend on its batch.

    Args:
        model, tokenizer: what computes; they must belong together.
        batch_size: texts that are computed at once.
        where: revision, token, cache_dir, local_files_only and subfolder of the checkpoint, for pooling="auto".
        options: of FeatureOptions.

    Raises:
        ValueError: an unknown option, or a value that is not possible.
    """

    task = "feature-extraction"
    default_batch_size = 32

    def __init__(
        self,
        model: BaseModel,
        tokenizer: Tokenizer,
        *,
        batch_size: int | None = None,
        where: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, tokenizer, batch_size)
        self._where = dict(where or {})
        self._options = FeatureOptions().changed(options)

    def __call__(self, inputs: Any, *, batch_size: int | None = None, **options: Any) -> Any:
        """The vectors of texts.

        Args:
            inputs: a string, a list of strings, or a generator, iterable or torch Dataset of strings, whose results
                are made as they are asked for.
            batch_size: texts that are computed at once.
            options: as of the class.

        Returns:
            For a text the vectors [1, tokens, H] in the model's dtype; with `pooling` its vector [H] in float32. For a
            list of texts a list of these; for a stream an iterator over them. As nested lists, or with return_tensors
            as tensors on the CPU, where a list's pooled vectors are one tensor [texts, H].

        Raises:
            ValueError: an unknown or impossible option, an element that is no text or has no tokens, or a text longer
                than the model's learned positions without truncation.
        """
        chosen = self._options.changed(options)
        size = self._size(batch_size)
        read = read_inputs(inputs)
        run = _Run(self.model, self.tokenizer, chosen, self._sentence(chosen))
        results = chain.from_iterable(run.rows(batch) for batch in batches(read.prompts, size))
        if read.form == "stream":
            return (run.written(row) for row in results)
        if read.form == "one":
            return run.written(next(results))
        return run.written_list(list(results))

    def _sentence(self, options: FeatureOptions) -> Sentence | None:
        if options.pooling is None:
            return None
        if options.pooling != AUTO:
            return Sentence(pooling=options.pooling, normalize=bool(options.normalize))
        found = read_sentence(self.model.name_or_path, self._where)
        if found is None:
            raise bad_argument("pooling", AUTO, f"one of {list(POOLINGS)} here", "The checkpoint has no modules.json.")
        return found if options.normalize is None else replace(found, normalize=options.normalize)


@dataclass(frozen=True)
class _Run:
    """One call, its options complete."""

    model: BaseModel
    tokenizer: Tokenizer
    options: FeatureOptions
    sentence: Sentence | None

    @torch.no_grad()
    def rows(self, texts: Sequence[Any]) -> Iterator[Tensor]:
        """The result of each text, on the CPU."""
        columns = self._encode(texts)
        lengths = torch.tensor([len(ids) for ids in columns["input_ids"]])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        padded = {name: _padded(rows, mask) for name, rows in columns.items()}
        hidden = self.model(padded.pop("input_ids"), mask, **padded).last_hidden_state
        if self.sentence is not None:
            return iter(self.sentence.vectors(hidden, lengths.to(hidden.device)).cpu())
        return (row[None, :length] for row, length in zip(hidden.cpu(), lengths.tolist()))

    def _encode(self, texts: Sequence[Any]) -> dict[str, list[list[int]]]:
        """Tokens of each text, and their kinds where the model tells them apart."""
        odd = next((text for text in texts if not isinstance(text, str)), None)
        if odd is not None:
            raise bad_argument("an element of inputs", odd, "a string")
        texts = [text.lower() for text in texts] if self.sentence and self.sentence.lowercase else list(texts)
        encoded = self.tokenizer(texts, **self._tokenizing())
        for text, ids in zip(texts, encoded["input_ids"]):
            if not ids:
                raise bad_argument("an element of inputs", text, "a text that has tokens")
        names = ["input_ids", *(["token_type_ids"] if self.model.config.num_token_types else [])]
        return {name: encoded[name] for name in names if name in encoded}

    def _tokenizing(self) -> dict[str, Any]:
        options = dict(self.options.tokenize_kwargs or {})
        if self.options.truncation is not None:
            options["truncation"] = self.options.truncation
        asked = self.sentence.max_length if self.sentence is not None else None
        if asked is not None:
            options.setdefault("truncation", True)
        if options.get("truncation") and options.get("max_length") is None:
            length = min(self.tokenizer.model_max_length, self.model.config.max_position_embeddings)
            options["max_length"] = length if asked is None else min(asked, length)
        return options

    def written(self, row: Tensor) -> Any:
        """A text's result as the caller wants it."""
        return row if self.options.return_tensors else row.tolist()

    def written_list(self, rows: list[Tensor]) -> Any:
        """The results of a list of texts."""
        if self.options.return_tensors and self.sentence is not None:
            return torch.stack(rows) if rows else torch.empty(0, self.model.config.hidden_size)
        return [self.written(row) for row in rows]


def _padded(rows: Iterable[list[int]], mask: Tensor) -> Tensor:
    """[B, S] of the rows, filled up on the right with what the mask hides."""
    padded = torch.zeros(mask.shape, dtype=torch.int64)
    padded[mask] = torch.tensor([value for row in rows for value in row])
    return padded
