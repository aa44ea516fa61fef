"""What `generate` returns with return_dict_in_generate=True."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


class ModelOutput:
    """Base of outputs that are read as attributes, like a dict, or like a tuple of what is not None.

    `out.logits`, `out["logits"]`, `out[0]`, `out[:2]`, `out.to_tuple()`; iterating gives the names, as of a dict.
    """

    def keys(self) -> tuple[str, ...]:
        """Names of the fields that are not None."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)  # type: ignore[arg-type]

    def values(self) -> tuple[Any, ...]:
        """The fields that are not None."""
        return tuple(getattr(self, name) for name in self.keys())

    def items(self) -> tuple[tuple[str, Any], ...]:
        """(name, value) of the fields that are not None."""
        return tuple((name, getattr(self, name)) for name in self.keys())

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or `default` where it is None or unknown."""
        return getattr(self, name) if name in self.keys() else default

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are not None."""
        return self.values()

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self.values()[key]
        if key not in self.keys():
            raise KeyError(f"{key!r} is not in this output, which has: {', '.join(self.keys())}")
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __len__(self) -> int:
        return len(self.keys())


@dataclass(eq=False)
class GenerateDecoderOnlyOutput(ModelOutput):
    """Tokens, and what the output_ options asked for. N = rows times num_return_sequences, S = generated tokens."""

    sequences: Tensor
    """[N, prompt + S] int64: prompts and answers, rows that ended early filled with the pad token."""
    scores: tuple[Tensor, ...] | None = None
    """S times [N, V] fp32: processed logits that each token was chosen from (output_scores=True)."""
    logits: tuple[Tensor, ...] | None = None
    """S times [N, V] fp32: the model's raw logits (output_logits=True)."""
    logprobs: Tensor | None = None
    """[N, S] fp32: log-probability of each generated token under the raw logits, 0 after a row's end
    (output_logprobs=True; Transformers has no such field)."""


@dataclass(eq=False)
class GenerateBeamDecoderOnlyOutput(ModelOutput):
    """The same of beam search. N = rows times num_return_sequences, M = rows times num_beams, S = tokens of the longest
    answer, T >= S = steps of the search."""

    sequences: Tensor
    """[N, prompt + S] int64: prompts and answers, each prompt's best first, filled with the pad token."""
    sequences_scores: Tensor | None = None
    """[N] fp32: log-probability of each answer, divided by its length to the power of length_penalty
    (output_scores=True)."""
    scores: tuple[Tensor, ...] | None = None
    """T times [M, V] fp32: processed log-probabilities of every beam's next token, 0 for rows whose search has ended
    (output_scores=True)."""
    logits: tuple[Tensor, ...] | None = None
    """T times [M, V] fp32: the model's raw logits (output_logits=True)."""
    beam_indices: Tensor | None = None
    """[N, S] int64: row of `scores` that each token was chosen from; -1 after an answer's end."""
    logprobs: Tensor | None = None
    """[N, S] fp32: log-probability of each generated token under the raw logits, 0 after an answer's end
    (output_logprobs=True; Transformers has no such field)."""


GenerateOutput = GenerateDecoderOnlyOutput | GenerateBeamDecoderOnlyOutput
"""Transformers' name for any output of `generate`."""
