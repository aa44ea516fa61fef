"""Real checkpoints give the same greedy tokens as transformers, and text that reads as English."""

import os
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from paths import DATA, ROOT, SHARED

from cuformers.auto.causal_lm import AutoModelForCausalLM

torch.set_num_threads(1)
STORIES = DATA / "checkpoints/stories260k"
SMOLLM2 = Path(os.environ.get("CUFORMERS_SMOLLM2", ROOT.parent / "tmp/smollm2/hf"))  # too large to copy
SMOLLM2_TOKENS = int(os.environ.get("CUFORMERS_SMOLLM2_TOKENS", 60))
PROMPT = [1, 403, 407, 261, 378]  # "Once upon a time"
STORY = (
    ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball. "
    "She wanted to play with it, but it was too high."
)


@cache
def pair(folder: Path) -> tuple:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", device_map="cpu", progress=False), theirs


def greedy(model, ids: torch.Tensor, count: int) -> list[list[int]]:
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None).tolist()


def test_stories_200_tokens() -> None:
    ours, theirs = pair(STORIES)
    prompt = torch.tensor([PROMPT])
    tokens = greedy(ours, prompt, 200)
    assert tokens == greedy(theirs, prompt, 200)
    text = transformers.AutoTokenizer.from_pretrained(STORIES).decode(tokens[0][len(PROMPT) :])
    assert text.strip().startswith(STORY)


def test_stories_logits() -> None:
    ours, theirs = pair(STORIES)
    ids = torch.randint(3, 512, (2, 120), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (ours(ids).logits - expected).abs().max() < 1e-4


@pytest.mark.skipif(not (SHARED.is_dir() and SMOLLM2.is_dir()), reason="SmolLM2-135M-Instruct is not here")
def test_smollm2() -> None:
    ours, theirs = pair(SMOLLM2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    chat = [{"role": "user", "content": "Tell me how bread is made, step by step."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = greedy(theirs, ids["input_ids"], SMOLLM2_TOKENS)
    assert greedy(ours, ids["input_ids"], SMOLLM2_TOKENS) == expected
