"""Stories from a hand-written grammar: a hero, a trait, a home, one plot of plots.txt told beat by beat.

`python grammar.py COUNT SEED` prints some.

The same seed gives the same stories. Slots of a plot: {N} the hero, {he} {him} {his} {himself} and capitals {He}
{His}; {F} the friend, {fkind}, {fhe} {fhim} {fhis} {Fhe}; {thing} {thing2} {food} {food2} {color} {out} {place}
{hobby} {hobby2} {rel} {rel_poss} {job} {time} {time_low} {weather} {animal1..3}; {a_x} is x with its article.
"""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import words

PLOTS_FILE = Path(__file__).with_name("plots.txt")
PRONOUNS = {"girl": ("she", "her", "her", "herself"), "boy": ("he", "him", "his", "himself")}

OPENINGS = (
    "Once upon a time, there was {a_trait} {kind} named {N}.",
    "Once upon a time, there was {a_kind} named {N}. {N} was very {trait}.",
    "Once upon a time, {a_trait} {kind} named {N} lived {place}.",
    "Once upon a time, {place}, there lived {a_kind} named {N}.",
    "There once was {a_trait} {kind} named {N}.",
    "{N} was {a_trait} {kind} who lived {place}.",
    "A long time ago, there was {a_trait} {kind} called {N}.",
    "Once there was {a_kind} named {N} who was very {trait}.",
)
HABITS = (
    "{He} liked to {hobby}.",
    "{N} loved to {hobby} and {hobby2}.",
    "Every day, {he} liked to {hobby}.",
    "{N} lived {place} with {his} {rel}.",
    "{He} had {a_color} {thing} that {he} loved very much.",
    "{His} best friend was {a_fkind} named {F}.",
    "{N} was {trait2} and {trait3}.",
    "",
)
ENDINGS = ("The end.", "And they all were happy.", "And they lived happily ever after.", "", "", "", "", "", "", "")


def read_plots(path: Path = PLOTS_FILE) -> list[list[tuple[bool, list[str]]]]:
    """Plots as beats `(may be left out, alternatives)`."""
    plots: list[list[tuple[bool, list[str]]]] = []
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith("plot "):
            plots.append([])
        elif line.strip() and not line.startswith("#"):
            optional = line.startswith("?")
            plots[-1].append((optional, [part.strip() for part in line.lstrip("? ").split(" | ")]))
    return plots


def _character(rng: random.Random, taken: str, human: float = 0.6) -> tuple[str, str, tuple[str, str, str, str]]:
    """(name, kind, pronouns): a child with probability `human`, else an animal or now and then a fairy-tale being."""
    w = words.load()
    sex = rng.choice(("girl", "boy"))
    kind, names = sex, w.girls if sex == "girl" else w.boys
    if rng.random() >= human:
        wonders = w.wonders + (w.wonders_she if sex == "girl" else w.wonders_he)
        kind, names = rng.choice(w.animals if rng.random() < 0.8 else wonders), w.animal_names
    name = words.made_up_name(rng) if rng.random() < 0.08 else rng.choice(names)
    return (name, kind, PRONOUNS[sex]) if name != taken else _character(rng, taken, human)


def slots(rng: random.Random) -> dict[str, str]:
    """One drawing of every slot."""
    w = words.load()
    name, kind, (he, him, his, himself) = _character(rng, "")
    # "Nib the mouse" tells more than "Joe the boy"
    friend, fkind, (fhe, fhim, fhis, _) = _character(rng, name, human=0.1)
    out = {"N": name, "kind": kind, "he": he, "him": him, "his": his, "himself": himself}
    out |= {"F": friend, "fkind": fkind, "fhe": fhe, "fhim": fhim, "fhis": fhis}
    for keys, words_ in (("thing thing2", w.things), ("food food2", w.foods), ("hobby hobby2", w.hobbies),
                         ("trait trait2 trait3", w.traits), ("animal1 animal2 animal3", w.animals)):  # fmt: skip
        out |= zip(keys.split(), rng.sample(words_, len(keys.split())), strict=True)
    for key, words_ in (("color", w.colors), ("out", w.outdoors), ("place", w.places), ("rel", w.relatives),
                        ("job", w.jobs), ("time", w.times), ("weather", w.weather)):  # fmt: skip
        out[key] = rng.choice(words_)
    for key in ("kind", "fkind", "thing", "thing2", "food", "food2", "color", "trait", "animal1"):
        out[f"a_{key}"] = words.with_article(out[key])
    out |= {"He": he.title(), "His": his.title(), "Fhe": fhe.title(), "rel_poss": f"{his} {out['rel']}"}
    out |= {"A_fkind": out["a_fkind"].capitalize(), "A_low_fkind": out["a_fkind"], "A_low_thing": out["a_thing"]}
    return out | {"A_low_animal1": out["a_animal1"], "time_low": out["time"][0].lower() + out["time"][1:]}


def opening(rng: random.Random, s: dict[str, str]) -> str:
    """The first one or two sentences."""
    first = rng.choice(OPENINGS[:5] if rng.random() < 0.8 else OPENINGS)
    habit = rng.choice(HABITS)
    if "{place}" in first and "{place}" in habit:
        habit = HABITS[0]
    return f"{first} {habit}".format(**s).strip()


def story(rng: random.Random, plots: list[list[tuple[bool, list[str]]]]) -> str:
    """One whole story on one line."""
    s = slots(rng)
    beats = [rng.choice(options) for optional, options in rng.choice(plots) if not (optional and rng.random() < 0.5)]
    text = " ".join([opening(rng, s), *(beat.format(**s) for beat in beats), rng.choice(ENDINGS)])
    return " ".join(text.split())


def _block(which: tuple[int, int, int]) -> list[str]:
    seed, block, count = which
    rng, plots = random.Random(f"{seed}-{block}"), read_plots()
    return [story(rng, plots) for _ in range(count)]


def many(count: int, seed: int = 0, block: int = 5000) -> list[str]:
    """`count` stories made on every core, the same whatever the number of cores."""
    blocks = [(seed, i, min(block, count - i * block)) for i in range(-(-count // block))]
    if len(blocks) < 4:
        return [text for which in blocks for text in _block(which)]
    with ProcessPoolExecutor() as pool:
        return [text for texts in pool.map(_block, blocks) for text in texts]


if __name__ == "__main__":
    import sys

    for text in many(int(sys.argv[1]), int(sys.argv[2])):
        print(text)
