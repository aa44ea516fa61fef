"""What a sampled text must be like to enter the corpus: plain ASCII prose, no talk about itself, no loops."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

PLAIN = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--")
META = re.compile(
    r"sure,|here is|here's a|language model|\bAI\b|as an|paragraph|in this story|the story|this story|short story|"
    r"write|note:|title|example|moral of|chapter|http|instructions|character|words:|\bsex|\bkill|\bdie[sd]?\b|\bdead|"
    r"blood|\bgun|drunk|\bwar\b|murder",
    re.IGNORECASE,
)
MARKUP = re.compile(r"[*#`_|<>\[\]{}\\=~^@$%&/+()]|\d")
SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[.!?]\")\s+")


def tidy(text: str) -> str:
    """One line, ASCII quotes, cut after its last whole sentence."""
    text = " ".join(text.translate(PLAIN).split())
    end = max(text.rfind(mark) for mark in (".", "!", "?", '."', '!"', '?"'))
    return text[: end + (2 if text[end + 1 : end + 2] == '"' else 1)] if end >= 0 else ""


def variety(words: list[str], n: int = 4) -> float:
    """Distinct n-grams over all n-grams, 1.0 where nothing repeats."""
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def why_not(text: str, *, least: int = 25, most: int = 260, least_variety: float = 0.93) -> str | None:
    """The reason to drop a tidy text, or None."""
    words = text.lower().split()
    sentences = [s for s in SENTENCE.split(text) if s]
    if not text.isascii() or MARKUP.search(text):
        return "markup"
    if META.search(text):
        return "meta"
    if not least <= len(words) <= most:
        return "length"
    if text.count('"') % 2:
        return "quotes"
    if variety(words) < least_variety or variety(words, 2) < 0.72:
        return "loops"
    if len(set(sentences)) < len(sentences) or max(len(s.split()) for s in sentences) > 32:
        return "sentences"
    return None


def common_only(texts: Iterable[str], least: int) -> list[str]:
    """Texts whose every lower-cased word occurs in at least `least` texts: the small model has no room for the rest.

    A name counts as the word it is, so a rare name drops its story.
    """
    texts = list(texts)
    bags = [set(re.findall(r"[a-z']+", text.lower())) for text in texts]
    count = Counter(word for bag in bags for word in bag)
    return [text for text, bag in zip(texts, bags, strict=True) if all(count[word] >= least for word in bag)]
