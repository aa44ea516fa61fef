"""Writes a text corpus, one story a line, by sampling a teacher: `python make_stories.py TEACHER OUT.txt --minutes 4`.

TEACHER is a Hugging Face llama folder. With a chat template the teacher is asked for a story about drawn words and its
answer is begun for it; without one (stories260k) the beginning alone is the prompt. Needs torch, safetensors,
tokenizers, and a CUDA device for speed. Resumable: run again, it goes on where it stopped, with new prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

import clean
import torch
import words
from llama import Llama
from sampler import Sampler, Sampling
from tokenizers import Tokenizer

STORIES = (
    "Write a very short story for a small child. Use easy words and short sentences. The story is about {about}.",
    "Tell a simple bedtime story about {about}. Keep it short.",
    "Write a short story for young children about {about}. It has a happy ending.",
    "Tell me a little story about {about}. Use simple words.",
)
# No "Once upon a time": that opening belongs to the grammar's stories, which hang together better than a teacher's.
BEGINNINGS = (
    "One day, {hero}",
    "One day, {name}",
    "{name} was",
    "{name} the {kind}",
    "{name} loved to {hobby}",
    "There once was {hero}",
    "In {home}, there",
    "{time}, {name}",
    "{weather}",
    "The {trait} {kind}",
    "The {job}",
    "Every day, {name}",
    '"Hello," said {name}',
    "My name is {name}",
)
OTHERS = (
    ("Explain to a small child in a few simple words what {a_thing} is for.", "{A_thing} is"),
    ("Describe {a_animal} to a small child in a few short sentences.", "{A_animal} is"),
    (
        "Write a short letter from a child named {name} to {name2} about a day at {out}. Use easy words.",
        "Dear {name2}, ",
    ),
    ("Write a short talk between {name} and {name2}, two children, about {a_thing}. Use easy words.", '"Look,'),
    ("Describe a day at {out} in a few short and simple sentences.", "The"),
    ("Tell a small child in a few short sentences what {a_job} does all day.", "{A_job}"),
)


def draw(rng: random.Random) -> tuple[str, str]:
    """(what to ask, how the answer begins)."""
    w, an = words.load(), words.with_article
    kind, names = rng.choice((("girl", w.girls), ("boy", w.boys), (rng.choice(w.animals), w.animal_names)))
    thing, animal, job, trait = map(rng.choice, (w.things, w.animals, w.jobs, w.traits))
    name, name2 = rng.choice(names), rng.choice(w.girls + w.boys)
    hero = an(f"{trait} {kind}")
    s = {"hero": hero, "name": name, "name2": name2, "kind": kind, "trait": trait, "job": job, "a_thing": an(thing)}
    s |= {"a_animal": an(animal), "a_job": an(job), "A_thing": an(thing).capitalize(), "A_job": an(job).capitalize()}
    s |= {"A_animal": an(animal).capitalize(), "home": rng.choice(("a small village", "a big city", "a deep forest"))}
    s |= {"out": rng.choice(w.outdoors), "hobby": rng.choice(w.hobbies), "time": rng.choice(w.times)}
    s |= {"weather": rng.choice(w.weather)}
    if rng.random() < 0.2:
        ask, beginning = rng.choice(OTHERS)
    else:
        more = (f"and {an(thing)}", f"who likes to {s['hobby']}", f", {an(animal)} and {an(rng.choice(w.foods))}",
                "who learns to be kind", f"at {s['out']}", f"and {an(job)}")  # fmt: skip
        about = f"{hero} {rng.choice(more)}".replace(" ,", ",")
        ask, beginning = rng.choice(STORIES).replace("{about}", about), rng.choice(BEGINNINGS)
    return ask.format(**s), beginning.format(**s).strip()


def read_prompter(folder: Path, tokenizer: Tokenizer):
    """(ask, beginning) -> token ids of the prompt; the ChatML form where the checkpoint has a chat template."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    chat = "<|im_start|>" in str(config.get("chat_template"))
    bos = json.loads((folder / "config.json").read_text())["bos_token_id"]

    def prompt(ask: str, beginning: str) -> list[int]:
        if not chat:
            return [bos] + [i for i in tokenizer.encode(beginning, add_special_tokens=False).ids if i != bos]
        text = f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n{beginning}"
        return tokenizer.encode(text, add_special_tokens=False).ids

    return prompt


def batches(args: argparse.Namespace, first: int):
    """Endless (index, texts) from batch `first` on."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Llama.load(args.teacher, device, torch.bfloat16 if device == "cuda" else torch.float32)
    tokenizer = Tokenizer.from_file(str(args.teacher / "tokenizer.json"))
    tokenizer.no_truncation()
    prompt = read_prompter(args.teacher, tokenizer)
    ends = json.loads((args.teacher / "generation_config.json").read_text()).get("eos_token_id", 2)
    ends = set(ends if isinstance(ends, list) else [ends]) | {0}
    how = Sampling(temperature=args.temperature, top_p=args.top_p, top_k=50, repetition_penalty=args.penalty)
    sampler = Sampler(model, args.rows, 64, args.new, how, graph=device == "cuda" and not args.no_graph)
    index = first
    while True:
        rng = random.Random(f"{args.seed}-{index}")
        torch.manual_seed(args.seed * 100_003 + index)
        drawn = [draw(rng) for _ in range(args.rows)]
        rows = sampler([prompt(*pair) for pair in drawn])
        kept = [row[: next((i for i, t in enumerate(row) if t in ends), len(row))] for row in rows]
        yield index, [pair[1] + text for pair, text in zip(drawn, decode(tokenizer, kept, args.teacher), strict=True)]
        index += 1


def decode(tokenizer: Tokenizer, rows: list[list[int]], folder: Path) -> list[str]:
    """The rows' texts, a leading space kept: a byte-fallback decoder eats the first one, so a mark goes before it."""
    if not json.loads((folder / "tokenizer.json").read_text())["model"].get("byte_fallback"):
        return tokenizer.decode_batch(rows)
    mark = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    whole = tokenizer.decode_batch([mark + row for row in rows])
    return [text[len(tokenizer.decode(mark)) :] for text in whole]


def main() -> None:
    """Sample until the minutes or the stories run out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0, help="stop starting batches after this long")
    parser.add_argument("--stories", type=int, default=10**9, help="stop when the file has this many")
    parser.add_argument("--rows", type=int, default=2048, help="stories sampled side by side")
    parser.add_argument("--new", type=int, default=224, help="new tokens a story")
    parser.add_argument("--temperature", type=float, default=0.55)
    parser.add_argument("--top-p", type=float, default=0.92)
    parser.add_argument("--penalty", type=float, default=1.1, help="repetition penalty")
    parser.add_argument("--variety", type=float, default=0.93, help="least share of distinct 4-grams")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graph")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--show", type=int, default=0, help="print this many kept texts of each batch")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    state = args.out.with_suffix(".state.json")
    done = json.loads(state.read_text()) if state.exists() else {"batch": 0, "stories": 0}
    begin, seen, fates = time.monotonic(), set[int](), Counter[str]()
    if args.out.exists():
        seen = {hash(line[:80]) for line in args.out.read_text().splitlines()}
    for index, texts in batches(args, done["batch"]):
        good = []
        for text in map(clean.tidy, texts):
            fate = clean.why_not(text, least_variety=args.variety)
            fate = fate or ("same" if hash(text[:80]) in seen else None)
            fates[fate or "kept"] += 1
            if fate is None:
                seen.add(hash(text[:80]))
                good.append(text)
        with args.out.open("a", encoding="ascii") as file:
            file.writelines(text + "\n" for text in good)
        done = {"batch": index + 1, "stories": done["stories"] + len(good)}
        state.write_text(json.dumps(done))
        minutes = (time.monotonic() - begin) / 60
        print(f"{minutes:6.2f} min  batch {index}  {done['stories']} stories  {dict(fates)}", flush=True)
        for text in good[: args.show]:
            print("   ", text, flush=True)
        if minutes > args.minutes or done["stories"] >= args.stories:
            break


if __name__ == "__main__":
    main()
