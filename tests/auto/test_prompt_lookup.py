"""prompt_lookup_num_tokens: generate gives the tokens that it gives without."""

import pytest
import torch
from models.checkpoints import shared, tokens


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}, {"repetition_penalty": 1.3}], ids=str)
def test_the_tokens_are_the_same(options: dict) -> None:
    ids = torch.cat([tokens(2, 9)] * 4, dim=1)
    common = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0, "do_sample": False, **options}
    model = shared("qwen3")
    plain = model.generate(ids, **common)
    guessed = model.generate(ids, prompt_lookup_num_tokens=5, max_matching_ngram_size=2, **common)
    assert torch.equal(plain, guessed)


def test_what_is_not_possible_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
        shared("qwen3").generate(tokens(1, 4), prompt_lookup_num_tokens=99)
