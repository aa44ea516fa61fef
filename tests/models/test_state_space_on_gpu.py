"""State-space models on a GPU: the kernels give the logits of plain PyTorch, and gradients are transformers'."""

import copy

import pytest
import torch

from cuformers import AutoModelForCausalLM
from tests.models.state_space import STATE_SPACE, folder, oracle

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", STATE_SPACE)
def test_kernels_give_transformers_logits(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder(name), dtype="float32", device_map="cuda", progress=False)
    chosen = {choice.op: choice.implementation.name for choice in model.kernels()}
    assert {chosen[op] for op in ("causal_conv1d", "selective_scan", "ssd_scan")} == {"triton"}
    ids = torch.randint(3, 128, (3, 90), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :37], mask[2, 5:] = 0, 0
    with torch.no_grad():
        found = model(ids.cuda(), attention_mask=mask.cuda()).logits.cpu()
        for row, real, logits in zip(ids, mask.bool(), found):
            expected = oracle(name)(row[real][None]).logits[0]
            assert (logits[real] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", STATE_SPACE)
def test_gradients_are_transformers(name: str) -> None:
    theirs = copy.deepcopy(oracle(name)).train()
    model = AutoModelForCausalLM.from_pretrained(folder(name), dtype="float32", device_map="cuda", progress=False)
    ids = torch.randint(3, 128, (2, 30), generator=torch.Generator().manual_seed(1))
    theirs(ids, labels=ids).loss.backward()
    expected = {n: p.grad for n, p in theirs.named_parameters()}
    for training in (True, False):
        model.train(training).zero_grad()
        model(ids.cuda(), labels=ids.cuda()).loss.backward()
        for parameter, p in model.named_parameters():
            grad = expected[model.spec.weight_map.to_file(parameter)[0]]
            error = (p.grad.cpu() - grad).norm() / grad.norm()
            assert error < 1e-3, f"{parameter}: {error:.1e}"


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_plain_pytorch(name: str) -> None:
    ids = torch.randint(3, 128, (2, 90), generator=torch.Generator().manual_seed(2))
    exact = oracle(name)(ids).logits
    model = AutoModelForCausalLM.from_pretrained(folder(name), dtype="bfloat16", device_map="cuda", progress=False)
    errors = []
    for kernels in ("auto", "reference"):
        model.set_kernels(kernels)
        errors.append((model(ids.cuda()).logits.float().cpu() - exact).norm() / exact.norm())
    assert errors[0] < 1.25 * errors[1], errors
