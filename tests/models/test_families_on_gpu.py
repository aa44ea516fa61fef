"""Every family on a GPU: the kernels give the tokens of plain PyTorch, and of transformers on the CPU."""

from pathlib import Path

import pytest
import torch

from cuformers.auto.causal_lm import AutoModelForCausalLM
from tests.models.families import FAMILIES, tiny_model

pytestmark = pytest.mark.gpu
OPTIONS = dict(max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_give_the_references_tokens(name: str, tmp_path: Path) -> None:
    oracle = tiny_model(name)
    oracle.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", device_map="cuda")
    torch.manual_seed(0)
    ids = torch.randint(3, 128, (3, 20))
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, :3] = 0, 0
    fast = model.generate(ids.cuda(), attention_mask=mask.cuda(), **OPTIONS)
    again = model.generate(ids.cuda(), attention_mask=mask.cuda(), **OPTIONS)  # from captured graphs
    assert torch.equal(fast, again)
    model.set_kernels("reference")
    model.set_attn_implementation("eager")
    assert torch.equal(fast, model.generate(ids.cuda(), attention_mask=mask.cuda(), **OPTIONS))
    row = ids[1:2]
    expected = oracle.generate(row, use_cache="longrope" not in name, **OPTIONS)
    assert torch.equal(fast[1:2].cpu(), expected)


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2", "eager"])
def test_bf16_logits_are_as_near_as_transformers(attention: str, tmp_path: Path) -> None:
    oracle = tiny_model("qwen3")
    oracle.save_pretrained(tmp_path)
    ids = torch.randint(3, 128, (2, 50), generator=torch.Generator().manual_seed(1))
    exact = oracle(ids).logits
    rounded = (oracle.bfloat16()(ids).logits.float() - exact).norm() / exact.norm()
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="bfloat16", device_map="cuda", attn_implementation=attention
    )
    with torch.no_grad():
        ours = model(ids.cuda()).logits.float().cpu()
    assert (ours - exact).norm() / exact.norm() < 1.25 * rounded


def test_what_a_hook_holds_is_not_overwritten(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", device_map="cuda")
    ids = torch.randint(3, 128, (2, 50), device="cuda")
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in model.model.layers:
        for module in (layer.self_attn, layer):
            module.register_forward_hook(lambda m, a, out: held.append((out, out.clone())))
    with torch.no_grad():
        model(ids)
    assert len(held) == 2 * len(model.model.layers)
    assert all(torch.equal(kept, copy) for kept, copy in held)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"])
def test_gradients_of_mixtures_are_transformers(name: str, tmp_path: Path) -> None:
    """The experts' kernels train; the rest is plain PyTorch."""
    oracle = tiny_model(name).train()
    oracle.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", device_map="cuda").train()
    chosen = {choice.op: choice.implementation.name for choice in model.kernels()}
    assert chosen["experts"] == "triton"
    ids = torch.randint(3, 128, (3, 30), generator=torch.Generator().manual_seed(2))
    options = {"output_router_logits": True}
    expected = oracle(ids, labels=ids, **options).loss
    found = model(ids.cuda(), labels=ids.cuda(), **options).loss
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=0)
    (expected + found.cpu()).backward()
    for parameter, p in oracle.named_parameters():
        error = (model.get_parameter(parameter).grad.cpu() - p.grad).norm() / p.grad.norm()
        assert error < 1e-3, f"{parameter}: {error:.1e}"


@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe"])
def test_gradients_in_evaluation_mode_are_whole(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", device_map="cuda")
    ids = torch.randint(3, 128, (2, 30), device="cuda")
    model(ids, labels=ids).loss.backward()
    evaluated = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.train()
    model(ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(evaluated[name], p.grad, msg=name)


@pytest.mark.parametrize("padded", [False, True])
def test_losses_and_gradients_of_training_are_those_of_the_logits(padded: bool, tmp_path: Path) -> None:
    """Labels on either device, half of them ignored, with and without padding."""
    tiny_model("gemma2").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", device_map="cuda").train()
    chosen = {choice.op: choice.implementation.name for choice in model.kernels()}
    assert chosen["linear_cross_entropy"] == "triton"
    ids = torch.randint(3, 128, (3, 30), generator=torch.Generator().manual_seed(2))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, ::2], mask[1, 20:] = -100, 1 - int(padded)
    found = []
    for given, skip in ((labels, None), (labels.cuda(), None), (labels.cuda(), False)):
        output = model(ids.cuda(), attention_mask=mask.cuda() if padded else None, labels=given, skip_logits=skip)
        assert (output.logits is None) == (skip is None)
        output.loss.backward()
        found.append((output.loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
        model.zero_grad()
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], found[2], rtol=1e-4, atol=1e-5)
