"""Turns text sources into token rows: the byte-level BPE tokenizer, one long stream with the stories' starts."""

from __future__ import annotations

import json
import lzma
import random
from array import array
from dataclasses import dataclass
from pathlib import Path

import clean
import grammar
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

BOS, EOS = "<s>", "</s>"
"""Ids 0 and 1: every story is BOS text EOS, and a prompt begins with BOS too (the tokenizer adds it)."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One text source: its name and its stories, the held-out ones apart."""

    name: str
    """As shown in the log."""
    train: list[str]
    """Stories to learn."""
    held: list[str]
    """Stories only to measure."""


def read(spec: str, *, common: int, seed: int) -> Source:
    """`grammar:COUNT`, or `FILE[:COUNT]` of one text a line (.xz opens too); files keep texts of common words only."""
    name, _, count = spec.partition(":")
    if name == "grammar":
        texts = grammar.many(int(count), seed)
    else:
        data = Path(name).read_bytes()
        lines = (lzma.decompress(data) if name.endswith(".xz") else data).decode("ascii").splitlines()
        texts = clean.common_only(dict.fromkeys(lines), common)[: int(count) if count else None]
    random.Random(seed).shuffle(texts)
    held = min(2000, len(texts) // 20)
    return Source(name=Path(name).name, train=texts[held:], held=texts[:held])


def tail(text: str, rng: random.Random) -> str:
    """The text from one of its later sentences on, so that the model can begin anywhere."""
    sentences = clean.SENTENCE.split(text)
    return " ".join(sentences[rng.randrange(1, max(2, len(sentences) - 2)) :])


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of `vocab` entries, all 256 bytes among them: every text has ids and comes back whole."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": EOS,
              "model_max_length": context, "clean_up_tokenization_spaces": False, "padding_side": "left"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class Stream:
    """Stories end to end: ids [N] int16, starts [stories] int64 (positions of BOS), and the text's bytes."""

    ids: Tensor
    starts: Tensor
    bytes: int

    @classmethod
    def of(cls, texts: list[str], tokenizer: Tokenizer, context: int) -> Stream:
        """The stream of `texts`, each BOS ... EOS; EOS pads the end so that a row may start at the last story."""
        rows = [[*encoded.ids, 1] for encoded in tokenizer.encode_batch_fast(texts)]
        lengths = torch.tensor([0, *map(len, rows)]).cumsum(0)
        flat = array("h")
        for row in [*rows, [1] * (context + 1)]:
            flat.extend(row)
        return cls(torch.frombuffer(flat, dtype=torch.int16), lengths[:-1], sum(map(len, texts)))

    def to(self, device: str) -> Stream:
        return Stream(self.ids.to(device), self.starts.to(device), self.bytes)

    def rows(self, starts: Tensor, context: int) -> Tensor:
        """Token rows [len(starts), context + 1] that begin at those positions."""
        return self.ids[starts[:, None] + torch.arange(context + 1, device=starts.device)].long()
