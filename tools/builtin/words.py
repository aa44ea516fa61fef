"""The word lists of words.txt, for the story grammar and the teacher's prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

WORDS_FILE = Path(__file__).with_name("words.txt")
ONSETS = "b c d f g h j k l m n p r s t v w z br cl fl gr pl sh st tr".split()  # noqa: SIM905
VOWELS = "aeiou"
CODAS = ("", "", "n", "l", "m", "r", "x", "ck", "bby", "tty", "nny", "na", "la", "mo", "ra", "do")


@dataclass(frozen=True, kw_only=True)
class Words:
    """One tuple a list of words.txt."""

    girls: tuple[str, ...]
    """Names."""
    boys: tuple[str, ...]
    """Names."""
    animal_names: tuple[str, ...]
    """Names of animals and wonders, of either sex."""
    animals: tuple[str, ...]
    """Kinds of animal."""
    wonders_she: tuple[str, ...]
    """Fairy-tale kinds that are "she"."""
    wonders_he: tuple[str, ...]
    """Fairy-tale kinds that are "he"."""
    wonders: tuple[str, ...]
    """Fairy-tale kinds of either sex."""
    traits: tuple[str, ...]
    """Adjectives of a character."""
    colors: tuple[str, ...]
    """Colours."""
    things: tuple[str, ...]
    """Countable things a child may own."""
    foods: tuple[str, ...]
    """Countable foods."""
    places: tuple[str, ...]
    """Homes, with their preposition."""
    outdoors: tuple[str, ...]
    """Places to go, with "the"."""
    hobbies: tuple[str, ...]
    """Verb phrases that follow "likes to"."""
    weather: tuple[str, ...]
    """Clauses."""
    times: tuple[str, ...]
    """Openings of a sentence: "One day"."""
    relatives: tuple[str, ...]
    """Family."""
    jobs: tuple[str, ...]
    """Grown-ups by trade."""


@cache
def load() -> Words:
    """words.txt, read once."""
    lists: dict[str, list[str]] = {}
    key = ""
    for line in WORDS_FILE.read_text(encoding="ascii").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if not line.startswith(" "):
            key, _, line = line.partition(":")
            lists[key] = []
        lists[key].append(line.strip())
    split = {key: tuple(w.strip() for w in " ".join(lines).split("|") if w.strip()) for key, lines in lists.items()}
    return Words(**{field.name: split[field.name] for field in fields(Words)})


def made_up_name(rng: random.Random) -> str:
    """A name nobody has, so that the model learns to carry any name through a story."""
    name = rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
    return (name if len(name) > 2 else name + rng.choice(("bo", "ka", "ri", "lo"))).capitalize()


def with_article(noun: str) -> str:
    """The noun phrase with "a" or "an" in front, by its sound."""
    silent, spoken = noun.startswith(("hour", "honest")), noun.startswith(("uni", "use", "one"))
    vowel = silent or (noun[0].lower() in "aeiou" and not spoken)
    return f"{'an' if vowel else 'a'} {noun}"
