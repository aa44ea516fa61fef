"""Writes the trained folder, its record and its card, and reads it back to show what it writes."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from corpus import save_tokenizer
from llama import Llama
from sampler import Sampler, Sampling
from tokenizers import Tokenizer

PROMPTS = (
    "Once upon a time",
    "Once upon a time, there was a robot named Max",
    "One day, a little girl",
    "The old king",
    "Tom and his dog",
    "It was a dark night",
    "Sally had a red balloon.",
    "My name is",
    "The sun",
    '"Hello," said the frog.',
)
CARD = """# A very small storyteller

A llama of {count:,} parameters that writes simple stories for small children: `cuformers generate "Once upon a time"`.
It knows little else; it ships to show and to test the whole path from text to text on any machine.

- Made by this project with `tools/builtin/train.py`, from random weights. Licence: MIT, like the project.
- Text: {sources}. `grammar` is the project's own story grammar (`tools/builtin/plots.txt`, `words.txt`; MIT).
  A file of stories is text sampled from the teacher named in docs/log.md with `tools/builtin/make_stories.py`.
- Held-out loss, nats a token: {losses}.
"""


def save(args: argparse.Namespace, model: Llama, tokenizer: Tokenizer, losses: dict[str, float]) -> None:
    """The Hugging Face folder args.out with its card, and OUT-run.json beside it: arguments, versions, losses."""
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    model.save(args.out, special)
    save_tokenizer(tokenizer, args.out, args.context)
    drawing = {**special, "do_sample": True, "temperature": 0.7, "top_p": 0.95}
    (args.out / "generation_config.json").write_text(json.dumps(drawing, indent=2) + "\n")
    facts = {"arguments": {k: str(v) for k, v in vars(args).items()}, "torch": torch.__version__,
             "held_out_nats_per_token": losses, "perplexity": {k: math.exp(v) for k, v in losses.items()}}  # fmt: skip
    (args.out.parent / f"{args.out.name}-run.json").write_text(json.dumps(facts, indent=2) + "\n")
    sources = ", ".join(Path(spec).name for spec in args.source)
    count = sum(p.numel() for p in model.parameters())
    shown = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    (args.out / "README.md").write_text(CARD.format(count=count, sources=sources, losses=shown))


def samples(folder: Path, tokenizer: Tokenizer, device: str) -> list[str]:
    """What the saved model writes, read back from its folder."""
    model = Llama.load(folder, device, torch.bfloat16 if device == "cuda" else torch.float32)
    torch.manual_seed(1)
    sampler = Sampler(model, len(PROMPTS), 32, 200, Sampling(temperature=0.7), graph=False)
    rows = sampler([tokenizer.encode(prompt).ids for prompt in PROMPTS])
    cut = [row[: row.index(1)] if 1 in row else row for row in rows]
    return [f"[{prompt}]{text}" for prompt, text in zip(PROMPTS, tokenizer.decode_batch(cut), strict=True)]
