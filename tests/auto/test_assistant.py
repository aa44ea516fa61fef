"""assistant_model: generate gives the tokens that it gives alone."""

import pytest
import torch
from models.checkpoints import shared, tokens

OPTIONS = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}


@pytest.mark.parametrize("options", [{}, {"num_assistant_tokens": 2}, {"do_sample": True, "seed": 3}], ids=str)
def test_the_tokens_are_the_same(options: dict) -> None:
    ids, model = tokens(2, 20), shared("qwen3")
    plain = model.generate(ids, **OPTIONS | options)
    for assistant in (shared("llama"), model):
        assert torch.equal(plain, model.generate(ids, assistant_model=assistant, **OPTIONS | options))
    assert model.engine_with(model) is model.engine_with(model), "its buffers are kept"


def test_what_is_not_possible_is_refused() -> None:
    model = shared("qwen3")
    with pytest.raises(ValueError, match=r"prompt_lookup_num_tokens=1.*assistant_model"):
        model.generate(tokens(1, 4), assistant_model=model, prompt_lookup_num_tokens=1)
    with pytest.raises(ValueError, match="num_beams=2"):
        model.generate(tokens(1, 4), assistant_model=model, num_beams=2, do_sample=False)
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        model.generate(tokens(1, 4), assistant_model=model, num_assistant_tokens=0)
