"""Adapters on a GPU: captured steps follow the adapter that is active, and training has the formula's gradients."""

from copy import deepcopy

import pytest
import torch
from models.checkpoints import load
from torch import Tensor

from adapters.lora import FAMILIES, IDS, adapted, factors, formula
from cuformers import LoraConfig

pytestmark = pytest.mark.gpu
OPTIONS = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)


def off(ours: Tensor, exact: Tensor) -> float:
    """Relative error over all."""
    return ((ours.float().cpu() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_follow_the_active_adapter(family: str) -> None:
    model, ids = adapted(family, dtype="float32", device_map="cuda"), IDS.cuda()
    merged = deepcopy(model).merge_and_unload().generate(ids, **OPTIONS)
    plain = load(family, device_map="cuda").generate(ids, **OPTIONS)
    assert not torch.equal(plain, merged)
    for _ in range(2):
        for _ in range(2):  # the second time from captured graphs
            assert torch.equal(model.generate(ids, **OPTIONS), merged)
        with model.disable_adapter():
            for _ in range(2):
                assert torch.equal(model.generate(ids, **OPTIONS), plain)
    model.merge_adapter()
    assert torch.equal(model.generate(ids, **OPTIONS), merged)
    model.unmerge_adapter()
    assert torch.equal(model.generate(ids, **OPTIONS), merged)


def test_an_adapter_that_takes_anothers_place_and_memory_is_noticed() -> None:
    model, ids = adapted("llama", device_map="cuda"), IDS.cuda()
    before = model.generate(ids, **OPTIONS)
    model.delete_adapter("default")
    model.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    plain = load("llama", device_map="cuda").generate(ids, **OPTIONS)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **OPTIONS), plain)  # B is zero
    assert not torch.equal(before, plain)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-4), ("bfloat16", 0.06)])
def test_training_has_the_formulas_gradients(family: str, dtype: str, bound: float) -> None:
    model = adapted(family, dtype=dtype, device_map="cuda").train()
    ours = factors(model)
    exact = {path: tuple(t.detach().cpu().requires_grad_() for t in pair) for path, pair in ours.items()}
    expected = formula(family, 1.5, exact)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    logits = model(IDS.cuda()).logits
    (logits.float() * weight.cuda()).sum().backward()
    (expected * weight).sum().backward()
    assert off(logits.detach(), expected.detach()) < bound
    for path, pair in ours.items():
        for one, other in zip(pair, exact[path]):
            assert one.grad is not None and one.grad.dtype is torch.float32 and other.grad is not None
            assert off(one.grad, other.grad) < 3 * bound, path


def test_a_merge_keeps_the_logits() -> None:
    for dtype, bound in (("float32", 1e-5), ("bfloat16", 0.06)):
        model = adapted("qwen3", dtype=dtype, device_map="cuda")
        with torch.no_grad():
            beside = model(IDS.cuda()).logits
            model.merge_adapter()
            assert off(model(IDS.cuda()).logits, beside.float().cpu()) < bound
