"""Draws follow transformers' processed probabilities, repeat with their seed, and do not depend on batch mates."""

import pytest
import torch
from models.checkpoints import load, oracle, shared, tokens
from torch import Tensor

NAME = "llama"


def draw(model, ids: Tensor, **options) -> Tensor:
    return model.generate(ids, **{"do_sample": True, "eos_token_id": None, "pad_token_id": 0, **options})


@pytest.mark.parametrize("options", [
    {"top_k": 0},
    {"temperature": 1.6, "top_k": 0},
    {"top_k": 8},
    {"top_k": 0, "top_p": 0.8},
    {"top_k": 0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 0, "typical_p": 0.7},
    {"top_k": 0, "repetition_penalty": 1.5},
    {"top_k": 0, "top_p": 0.8, "output_scores": True, "return_dict_in_generate": True},
])  # fmt: skip
def test_draws_follow_transformers_probabilities(options: dict) -> None:
    """3000 draws of one token: the chi-squared statistic is within 5 sigma, and no removed token is ever drawn."""
    count, ids = 3000, tokens(1, 6, seed=1)
    keep = {k: v for k, v in options.items() if k not in ("output_scores", "return_dict_in_generate")}
    theirs = oracle(NAME).generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=1,
                                   output_scores=True, return_dict_in_generate=True, **keep)  # fmt: skip
    expected = theirs.scores[0][0].softmax(-1) * count
    drawn = draw(shared(NAME), ids, max_new_tokens=1, num_return_sequences=count, seed=11, **options)
    drawn = (drawn if isinstance(drawn, Tensor) else drawn.sequences)[:, -1]
    found = torch.bincount(drawn, minlength=len(expected)).float()
    assert (found[expected == 0] == 0).all(), "a removed token was drawn"
    rare = expected < 5  # the statistic needs larger cells
    pairs = [(found[~rare], expected[~rare]), (found[rare].sum()[None], expected[rare].sum()[None])]
    statistic = sum(((f - e) ** 2 / e.clamp(min=1e-9)).sum() for f, e in pairs if e.sum() > 1)
    freedom = int((~rare).sum()) + int(expected[rare].sum() > 1) - 1
    assert freedom > 2
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, f"{statistic:.0f} with {freedom} degrees of freedom"


def test_a_seed_repeats_and_another_one_does_not() -> None:
    ids, model = tokens(2, 6), shared(NAME)
    one, two = draw(model, ids, seed=5, max_new_tokens=20), draw(model, ids, seed=6, max_new_tokens=20)
    assert torch.equal(one, draw(model, ids, seed=5, max_new_tokens=20))
    assert not torch.equal(one[0], two[0]) and not torch.equal(one[1], two[1])


def test_every_position_has_noise_of_its_own() -> None:
    """Where all tokens are about as likely, one noise for all positions would draw one token for ever."""
    out = draw(shared(NAME), tokens(4, 6), seed=1, max_new_tokens=25, temperature=1e3, top_k=0)[:, 6:]
    assert all(len(set(row)) > 15 for row in out.tolist())
    assert len({tuple(column) for column in out.T.tolist()}) == 25 and len(set(out[:, 0].tolist())) > 1


def test_torchs_seed_repeats_too() -> None:
    ids, model, drawn = tokens(2, 6), shared(NAME), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(draw(model, ids, max_new_tokens=20))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("name", [NAME, "phi3-longrope", "gemma3_text"])
def test_a_row_with_a_seed_does_not_depend_on_its_batch_mates(name: str) -> None:
    model, ids = shared(name), tokens(4, 10)
    mask = torch.tensor([[0] * (10 - n) + [1] * n for n in (10, 3, 7, 1)])
    options = {"max_new_tokens": 25, "temperature": 1.2, "top_k": 40, "top_p": 0.95}
    together = draw(model, ids * mask, attention_mask=mask, seed=[7, 8, 9, 10], **options)
    for i, seed in enumerate((7, 8, 9, 10)):
        alone = draw(model, ids[i : i + 1, mask[i].bool()], seed=[seed], **options)
        assert together[i, 10:].tolist() == alone[0, -25:].tolist()


def test_several_answers_per_prompt() -> None:
    model, ids = shared(NAME), tokens(2, 6)
    out = draw(model, ids, num_return_sequences=3, seed=1, max_new_tokens=12)
    assert torch.equal(out[:, :6], ids.repeat_interleave(3, 0))
    assert len({tuple(row) for row in out.tolist()}) == 6, "answers differ"
    seeds = draw(model, ids, num_return_sequences=3, seed=[1, 2, 3, 4, 5, 6], max_new_tokens=12)
    again = draw(model, ids[1:], num_return_sequences=2, seed=[4, 6], max_new_tokens=12)
    assert torch.equal(seeds[[3, 5]], again)
    with pytest.raises(ValueError, match="one for each row"):
        draw(model, ids, num_return_sequences=3, seed=[1, 2], max_new_tokens=12)


def test_scores_of_drawn_tokens_are_finite_and_hold_the_filters() -> None:
    out = draw(shared(NAME), tokens(2, 6), top_k=5, seed=2, max_new_tokens=8, output_scores=True,
               output_logits=True, return_dict_in_generate=True)  # fmt: skip
    for step, (scores, logits) in enumerate(zip(out.scores, out.logits)):
        kept = scores > float("-inf")
        assert (kept.sum(1) == 5).all()
        assert torch.equal(scores[kept], logits[kept])
        assert kept.gather(1, out.sequences[:, 6 + step, None]).all()


def test_two_seeds_are_two_draws_within_one_model_of_bfloat16() -> None:
    model = load(NAME, dtype="bfloat16")
    out = draw(model, tokens(1, 6), num_return_sequences=8, seed=0, max_new_tokens=10)
    assert len({tuple(row) for row in out.tolist()}) > 4
