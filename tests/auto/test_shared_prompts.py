"""Several answers to one prompt cost one prompt: what they share is computed once."""

import pytest
import torch
from models.checkpoints import load, shared, tokens

from cuformers.engine.capacity import PAGE_SIZE


def hits(model) -> int:
    assert model.engine.planner is not None
    return model.engine.planner.stats().hit_tokens


@pytest.mark.parametrize("length, shared_pages", [(200, 3), (129, 2), (128, 1), (65, 1), (64, 0)])
def test_answers_share_the_full_pages_before_a_prompts_last_token(length: int, shared_pages: int) -> None:
    model, ids, count = load("llama"), tokens(1, length), 5
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": True, "eos_token_id": None}
    together = model.generate(ids, num_return_sequences=count, seed=list(range(count)), **options)
    assert hits(model) == (count - 1) * shared_pages * PAGE_SIZE
    for seed, row in enumerate(together):
        assert torch.equal(shared("llama").generate(ids, seed=[seed], **options)[0], row)


def test_prompts_that_begin_alike_share_the_beginning() -> None:
    model, ids = load("llama"), tokens(3, 150)
    ids[1:, :130] = ids[0, :130]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": True, "eos_token_id": None}
    model.generate(ids, num_return_sequences=2, seed=7, **options)
    assert hits(model) == 5 * 2 * PAGE_SIZE


def test_a_prompt_in_several_steps_is_still_computed_once() -> None:
    """The other answers are let in beside its last chunk."""
    model, ids = load("llama"), tokens(1, 200)
    model.engine.max_batch_tokens = 128
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": True, "eos_token_id": None}
    model.generate(ids, num_return_sequences=4, seed=7, **options)
    assert hits(model) == 3 * 3 * PAGE_SIZE
