"""attn_implementation at load, from the config, at run time and when the mode changes; backends in whole models."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cuformers import AutoConfig, AutoModelForCausalLM
from cuformers.nn.attention.over_pages import TritonAttention
from tests.models.checkpoints import folder, load, oracle, tokens

ON_CPU = ("sdpa", "eager", "flex_attention")


@pytest.mark.parametrize("asked, name", [
    ("paged|sdpa", "sdpa"), ("paged|eager", "eager"), ("paged|flex_attention", "flex_attention"),
    ({"": "eager"}, "eager"), ({"": "paged|eager"}, "eager"), ({"": None}, "sdpa"), (None, "sdpa"),
], ids=str)  # fmt: skip
def test_other_ways_to_say_it(asked: Any, name: str) -> None:
    model = load("llama", attn_implementation=asked)
    assert model.attn_implementation == name
    model.set_attn_implementation("eager" if name == "sdpa" else "sdpa")
    assert model.attn_implementation != name
    model.set_attn_implementation(asked)
    assert model.attn_implementation == name


@pytest.mark.parametrize(
    "asked", [{"text_config": "sdpa"}, {"": "sdpa", "vision": "eager"}, {}, 2, ["sdpa"], {"": 3}], ids=str
)
def test_what_is_no_name(asked: Any) -> None:
    with pytest.raises(ValueError, match=r"attn_implementation=.* is not possible"):
        load("llama", attn_implementation=asked)


@pytest.mark.parametrize("name", ["paged|flash_attention_2", "flash_attention_3", "flash_attention_4", "triton"])
def test_what_needs_a_gpu_says_so_at_load(name: str) -> None:
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU.*Possible here: \['sdpa', 'flex_attention', 'eager'\]"):
        load("llama", attn_implementation=name)


def with_config(tmp_path: Path, **values: Any) -> Path:
    """A copy of a checkpoint whose config.json says more."""
    for file in folder("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | values
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_the_configs_choice_is_taken(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_config(tmp_path, **{key: "eager"})
    model = AutoModelForCausalLM.from_pretrained(path, device_map="cpu")
    assert model.attn_implementation == "eager" and "attn_implementation" not in capsys.readouterr().err
    assert AutoConfig.from_pretrained(path)._attn_implementation == "eager"
    asked = AutoModelForCausalLM.from_pretrained(path, device_map="cpu", attn_implementation="sdpa")
    assert asked.attn_implementation == "sdpa"
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["attn_implementation"] == "eager"


@pytest.mark.parametrize("wish, why", [
    ("flash_attention_2", "needs an NVIDIA GPU"), ("their_own", "is unknown"), ("some/kernel", "a hub kernel is"),
])  # fmt: skip
def test_a_wish_that_can_not_be_is_said_and_passed_over(wish: str, why: str, tmp_path: Path, capsys) -> None:
    model = AutoModelForCausalLM.from_pretrained(with_config(tmp_path, attn_implementation=wish), device_map="cpu")
    said = capsys.readouterr().err
    assert model.attn_implementation == "sdpa" and f"'{wish}' is passed over" in said and why in said


def test_a_config_object_and_from_config() -> None:
    config = AutoConfig.from_pretrained(folder("llama"), attn_implementation="eager")
    assert AutoModelForCausalLM.from_config(config, device_map="cpu").attn_implementation == "eager"
    config._attn_implementation = "flex_attention"
    assert AutoModelForCausalLM.from_config(config, device_map="cpu").attn_implementation == "flex_attention"
    asked = AutoModelForCausalLM.from_config(config, device_map="cpu", attn_implementation="paged|sdpa")
    assert asked.attn_implementation == "sdpa"
    assert "attn_implementation" not in AutoConfig.from_pretrained(folder("llama")).to_dict()


def test_a_mode_that_attention_can_not_serve_is_refused_and_nothing_changes() -> None:
    model = load("llama", attn_implementation="flex_attention")
    before = model.kernels()
    with pytest.raises(ValueError, match="flex_attention has no backward pass on the CPU"):
        model.train()
    assert not model.training and not model.model.layers[0].training and model.attn_implementation == "flex_attention"
    assert model.kernels() == before
    model.set_attn_implementation("sdpa")
    assert model.train().training and model.attention_problem.train
    with pytest.raises(ValueError, match="no backward pass"):
        model.set_attn_implementation("flex_attention")
    assert model.eval().attn_implementation == "sdpa" and not model.attention_problem.train


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_and_empty_rows(name: str, side: str) -> None:
    model, ids = load("mistral", attn_implementation=name), tokens(4, 24)
    mask = torch.ones_like(ids)
    for row, (left, right) in enumerate(((0, 0), (5, 5), (23, 23))):
        mask[row, : left if side != "right" else 0] = 0
        mask[row, 24 - right if side == "right" else 24 :] = 0
    if side == "both":
        mask[1, 20:] = 0
    mask[3] = 0  # nothing to see anywhere
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        for row in range(3):
            alone = oracle("mistral")(ids[row][mask[row].bool()][None]).logits[0]
            torch.testing.assert_close(logits[row][mask[row].bool()], alone, rtol=1e-4, atol=1e-4)
        assert logits.isfinite().all()
        assert not model(ids, attention_mask=torch.zeros_like(ids)).logits.any(), "no token, no logits"


@pytest.mark.parametrize("name", ON_CPU)
def test_positions_that_do_not_begin_at_zero(name: str) -> None:
    ids, positions = tokens(2, 12), torch.arange(5, 17)[None]
    model = load("llama", attn_implementation=name)
    with torch.no_grad():
        expected = oracle("llama")(ids, position_ids=positions).logits
        torch.testing.assert_close(model(ids, position_ids=positions).logits, expected, rtol=1e-4, atol=1e-4)


def test_training_is_the_same_with_each_backend() -> None:
    losses: dict[str, list[float]] = {}
    for name in ("sdpa", "eager"):
        model = load("mistral", attn_implementation=name).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses[name] = []
        for step in range(20):
            loss = model(tokens(2, 20, seed=step), labels=tokens(2, 20, seed=step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["sdpa"] == pytest.approx(losses["eager"], rel=1e-4) and len(set(losses["sdpa"])) == 20


def test_a_copy_chooses_anew() -> None:
    model = load("llama", attn_implementation="flex_attention")
    with torch.no_grad():
        expected = model(tokens(2, 9)).logits
        other = copy.deepcopy(model)
        assert other.attn_implementation == "flex_attention" and other.backend is not model.backend
        assert torch.equal(other(tokens(2, 9)).logits, expected)


@pytest.mark.parametrize("name", ["eager", "flex_attention"])
def test_generation_is_the_same_with_each_backend(name: str) -> None:
    model, ids = load("gemma2"), tokens(2, 9)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation(name)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_backends_in_a_model_on_a_gpu(family: str) -> None:
    ids = tokens(2, 40).cuda()
    model = load(family, device_map="cuda", attn_implementation="eager")
    with torch.no_grad():
        expected = model(ids).logits
        answer = model.generate(ids, max_new_tokens=20, do_sample=False)
        for name in ("sdpa", "triton", "flex_attention"):
            if family == "gemma2" and name == "sdpa":
                continue
            model.set_attn_implementation(name)
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-3)
            assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), answer)


@pytest.mark.gpu
def test_triton_is_the_engines_own_kernel_and_for_inference() -> None:
    model = load("gemma2", device_map="cuda", dtype="bfloat16")
    assert model.attn_implementation == TritonAttention.name and model.engine.backend is None
    model.set_attn_implementation("triton")
    assert model.engine.backend is None
    with pytest.raises(ValueError, match="triton has no backward pass: it is for inference"):
        model.train()
    model.set_attn_implementation(None)
    assert model.train().attn_implementation == "flex_attention"
    loss = model(tokens(2, 30).cuda(), labels=tokens(2, 30).cuda()).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.gpu
def test_large_heads_need_no_square_scores() -> None:
    from cuformers.nn.attention.backend import AttentionSpec
    from cuformers.nn.attention.sdpa import SdpaAttention
    from cuformers.nn.step import full_step

    spec = AttentionSpec(layer=0, num_heads=32, num_kv_heads=8, head_dim=512, scale=0.04)
    q, k, v = (torch.randn(8192, heads, 512, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8))
    step = full_step(torch.arange(8192, device="cuda"), (8192,), SdpaAttention())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        SdpaAttention().forward(q, k, v, spec, step)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < 2**31, f"{grown / 2**30:.1f} GiB; the scores alone would be 4"
