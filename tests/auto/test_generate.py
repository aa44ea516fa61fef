"""generate gives transformers' greedy tokens on every family, alone and padded, and whatever happened to the model."""

import copy

import pytest
import torch
from models.checkpoints import ALONE, load, oracle, shared, tokens
from models.families import FAMILIES
from torch import Tensor

NEW = 30
WITHOUT_CACHE = ("phi3-longrope",)
"""Rows where transformers' cached path loses the context as the factors switch: compared with use_cache=False."""


def greedy(model, ids: Tensor, count: int = NEW, **options) -> Tensor:
    options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(ids, max_new_tokens=count, do_sample=False, **options)


def theirs(name: str, ids: Tensor, count: int = NEW, **options) -> Tensor:
    model = copy.deepcopy(oracle(name)) if name in ALONE else oracle(name)  # rotations of earlier calls stay behind
    return greedy(model, ids, count, use_cache=name not in WITHOUT_CACHE, **options)


def padded(lengths: tuple[int, ...], side: str = "left") -> tuple[Tensor, Tensor]:
    width = max(lengths)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    mask = mask if side == "left" else mask.flip(1)
    return tokens(len(lengths), width, seed=3) * mask, mask


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens(name: str) -> None:
    model, lengths = shared(name), (1, 7, 20)
    ids, mask = padded(lengths)
    together = greedy(model, ids, attention_mask=mask)
    assert torch.equal(together[:, :20], ids)
    if name not in ALONE:
        assert torch.equal(together, theirs(name, ids, attention_mask=mask))
    for row, real, expected in zip(ids, mask.bool(), together[:, 20:]):
        prompt = row[real][None]
        assert torch.equal(greedy(model, prompt, 12)[0, -12:], expected[:12])
        if name in ALONE:
            assert torch.equal(theirs(name, prompt)[0, -NEW:], expected)


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope", "mistral", "gemma3_text"])
def test_greedy_tokens_past_the_length_of_the_model(name: str) -> None:
    """From 50 to 90 of 64 positions; LongRoPE's switch at 32 is crossed by the rows above."""
    ids = tokens(1, 50, seed=4)
    assert torch.equal(greedy(shared(name), ids, 40), theirs(name, ids, 40))


def test_right_padding_gives_the_same_continuations() -> None:
    model = shared("llama")
    left, right = padded((4, 9)), padded((4, 9), "right")
    right_ids = torch.zeros_like(right[0])
    for i, n in enumerate((4, 9)):
        right_ids[i, :n] = left[0][i, 9 - n :]
    a, b = greedy(model, left[0], attention_mask=left[1]), greedy(model, right_ids, attention_mask=right[1])
    assert torch.equal(a[:, 9:], b[:, 9:]) and torch.equal(b[:, :9], right_ids)


def test_pad_tokens_are_padding_without_a_mask() -> None:
    ids, mask = padded((4, 9))
    model = shared("llama")
    assert torch.equal(
        model.generate(ids, max_new_tokens=5), model.generate(ids, attention_mask=mask, max_new_tokens=5)
    )


def test_batches_and_lengths_that_grow_and_shrink() -> None:
    model = load("qwen3")
    for batch, length, count in [(1, 5, 4), (8, 5, 4), (4, 30, 70), (8, 3, 2), (2, 90, 5), (1, 5, 4)]:
        ids = tokens(batch, length, seed=batch)
        assert torch.equal(greedy(model, ids, count), theirs("qwen3", ids, count)), (batch, length, count)


def test_generate_in_train_mode() -> None:
    ids = tokens(2, 6)
    model = load("gemma2").train()
    assert torch.equal(greedy(model, ids), theirs("gemma2", ids))
    assert model.training
    model(ids, labels=ids).loss.backward()  # training goes on
    assert all(p.grad is not None for p in model.parameters())


def test_training_and_generating_in_turn_trains_the_same_weights() -> None:
    """Two optimizer steps with generate before, between and after: bitwise the weights of training alone."""
    ids = tokens(2, 12, seed=5)
    models = [load("llama-tied").train() for _ in range(2)]
    for index, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            if index:
                greedy(model, ids, 3)
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))
    again = copy.deepcopy(oracle("llama-tied"))
    again.load_state_dict(models[1].state_dict())
    assert torch.equal(greedy(models[1], ids), greedy(again, ids))


@pytest.mark.parametrize("change", ["in place", "load_state_dict", "assign", "parameter", "replaced leaf"])
def test_weights_that_change_after_a_call(change: str) -> None:
    ids, model = tokens(2, 6), load("llama")
    before = greedy(model, ids)
    other = copy.deepcopy(oracle("llama"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)) * 0.1)
        if change == "in place":
            for name, parameter in other.named_parameters():
                model.get_parameter(name).copy_(parameter)
        elif change == "load_state_dict":
            model.load_state_dict(other.state_dict())
        elif change == "assign":
            model.load_state_dict(other.state_dict(), assign=True)
        else:
            other.load_state_dict(oracle("llama").state_dict())
            weight = torch.nn.Parameter(other.model.layers[1].mlp.up_proj.weight * 1.5)
            for one in (model, other):
                if change == "parameter":
                    one.model.layers[1].mlp.up_proj.weight = weight
                else:
                    one.model.layers[1].mlp.up_proj = torch.nn.Linear(64, 96, bias=False)
                    one.model.layers[1].mlp.up_proj.weight = weight
    assert torch.equal(greedy(model, ids), greedy(other, ids))
    assert not torch.equal(greedy(model, ids), before)


def test_generate_after_to() -> None:
    ids, model = tokens(2, 6), load("qwen2")
    greedy(model, ids)
    model.to(torch.bfloat16)
    assert torch.equal(greedy(model, ids), greedy(load("qwen2", dtype="bfloat16"), ids))
    assert model.dtype is torch.bfloat16
    with pytest.raises(ValueError, match="float64"):
        model.double()


def test_a_copy_is_a_model_of_its_own() -> None:
    ids, model = tokens(1, 6), load("llama")
    before = greedy(model, ids)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    assert not torch.equal(greedy(twin, ids), before)
    assert torch.equal(greedy(model, ids), before)
