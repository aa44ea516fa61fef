"""Token sequences that are banned or biased, matched for all rows at once without leaving the device."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.generation.penalties import mark
from cuformers.generation.rows import Rows


def no_repeat_ngram(scores: Tensor, rows: Rows, size: int) -> Tensor:
    """Bans every token that would complete an n-gram of `size` tokens which the row already has.

    Memory: [B, L, size] booleans.
    """
    count, width = rows.ids.shape
    if width < size:
        return scores
    windows = rows.ids.unfold(1, size, 1)  # [B, W, size]
    last_words = rows.tail(size - 1)
    same = (windows[..., :-1] == last_words.ids[:, None]).all(-1) & last_words.present.all(-1, keepdim=True)
    if rows.lengths is not None:
        ends = torch.arange(size, width + 1, device=rows.ids.device)
        same &= ends <= rows.lengths[:, None]
    assert same.shape == (count, width - size + 1)
    return scores.masked_fill(mark(scores, windows[..., -1], same), -math.inf)


class TokenSet:
    """Token ids as a mask over the vocabulary, made once for each device and vocabulary size."""

    def __init__(self, name: str, ids: Iterable[int], *, strict: bool = True) -> None:
        """
        Args:
            name: the option, for error messages.
            ids: token ids.
            strict: whether an id outside the vocabulary is an error; else it is left out.
        """
        self.name, self.ids, self.strict = name, tuple(ids), strict
        self._mask: Tensor | None = None

    def mask(self, scores: Tensor) -> Tensor:
        """[V] bool on the device of scores [B, V].

        Raises:
            ValueError: an id outside the vocabulary.
        """
        vocab = scores.shape[-1]
        if self._mask is None or self._mask.device != scores.device or self._mask.shape[0] != vocab:
            if self.strict:
                check_vocabulary(self.name, self.ids, vocab)
            mask = torch.zeros(vocab, dtype=torch.bool)
            mask[[i for i in self.ids if 0 <= i < vocab]] = True
            self._mask = mask.to(scores.device)
        return self._mask

    def force(self, scores: Tensor) -> Tensor:
        """[V]: 0 for these tokens, -inf for all others."""
        return torch.where(self.mask(scores), 0.0, -math.inf).to(scores.dtype)


class BiasTable:
    """Sequences with a bias for their last token, laid out so that all are matched in one comparison."""

    def __init__(self, name: str, pairs: Sequence[tuple[tuple[int, ...], float]]) -> None:
        """
        Args:
            name: the option, for error messages.
            pairs: (token ids, bias); of equal sequences the last one counts.
        """
        self.name = name
        merged = dict(pairs)
        self.single = {ids[0]: bias for ids, bias in merged.items() if len(ids) == 1}
        self.longer = {ids: bias for ids, bias in merged.items() if len(ids) > 1}
        self._tables: tuple[Tensor, ...] | None = None

    def add(self, scores: Tensor, rows: Rows) -> Tensor:
        """The scores with the bias of every sequence that the next token may complete.

        As in Transformers a sequence counts only in rows that have at least as many tokens as itself.

        Raises:
            ValueError: a token id outside the vocabulary.
        """
        single, prefixes, lengths, lasts, biases = self._on(scores)
        bias = single.expand_as(scores)
        if self.longer:
            tail = rows.tail(prefixes.shape[1])
            fits = ((tail.ids[:, None] == prefixes) | (prefixes < 0)).all(-1)  # [B, S]
            fits = fits & (rows.length >= lengths)
            none = torch.zeros((), dtype=scores.dtype, device=scores.device)
            bias = bias.index_add(1, lasts, torch.where(fits, biases, none))
        return scores + bias

    def _on(self, scores: Tensor) -> tuple[Tensor, ...]:
        vocab = scores.shape[-1]
        if self._tables is None or self._tables[0].device != scores.device or self._tables[0].shape[0] != vocab:
            check_vocabulary(self.name, [*self.single, *(i for ids in self.longer for i in ids)], vocab)
            single = torch.zeros(vocab)
            for token, bias in self.single.items():
                single[token] = bias
            width = max((len(ids) - 1 for ids in self.longer), default=0)
            prefixes = [[-1] * (width - len(ids) + 1) + list(ids[:-1]) for ids in self.longer]
            tables = (
                single,
                torch.tensor(prefixes, dtype=torch.int64).view(len(prefixes), width),  # -1 matches any token
                torch.tensor([len(ids) for ids in self.longer], dtype=torch.int64),
                torch.tensor([ids[-1] for ids in self.longer], dtype=torch.int64),
                torch.tensor(list(self.longer.values()), dtype=torch.float32),
            )
            self._tables = tuple(t.to(scores.device) for t in tables)
        return self._tables


def check_vocabulary(name: str, ids: Iterable[int], vocab: int) -> None:
    """Raises ValueError where a token id is outside the vocabulary."""
    outside = sorted({i for i in ids if not 0 <= i < vocab})
    if outside:
        raise bad_argument(
            name, outside[:8], f"token ids from 0 to {vocab - 1}", "Were they made with another model's tokenizer?"
        )
