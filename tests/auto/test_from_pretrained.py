"""from_pretrained and from_config: what they take, what they make of it, and what they refuse by name."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from models.checkpoints import folder, load, oracle, tokens

from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.auto.config import AutoConfig

NAME = "llama"


@pytest.mark.parametrize("options, says", [
    ({"lowcpu": True}, "unknown arguments.*lowcpu"),
    ({"trust_remote_code": True}, "never runs code"),
    ({"dtype": "float13"}, "dtype='float13'.*bfloat16"),
    ({"dtype": torch.int8}, "dtype=torch.int8"),
    ({"use_safetensors": False}, "use_safetensors=False"),
    ({"device_map": "gpu"}, "gpu"),
    ({"device_map": "cuda:99"}, "cuda"),
    ({"kernels": "triton"}, "triton: needs an NVIDIA GPU"),
    ({"kernels": "cutlass"}, "kernels='cutlass'.*reference"),
    ({"attn_implementation": "flash_attention_2"}, r"needs an NVIDIA GPU.*here: \['sdpa', 'flex_attention', 'eager'\]"),
    ({"attn_implementation": "flash_attention_9"}, "flash_attention_9.*unknown.*sdpa"),
    ({"variant": "fp16"}, "fp16"),
    ({"subfolder": "inner"}, "inner"),
    ({"revision": "v2"}, "revision='v2'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ({"hidden_size": 32}, "model.embed_tokens.weight"),
])  # fmt: skip
def test_what_is_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load(NAME, **options)


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no config.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_they_are_never_instantiated() -> None:
    for cls in (AutoModelForCausalLM, AutoConfig):
        with pytest.raises(TypeError, match="from_pretrained"):
            cls()


def test_softcap_and_sdpa() -> None:
    with pytest.raises(ValueError, match=r"softcap.*Possible here: \['flex_attention', 'eager'\]"):
        load("gemma2", attn_implementation="sdpa")
    assert load("gemma2").attn_implementation == "eager"
    assert load(NAME).attn_implementation == "sdpa"


def test_an_impossible_attention_leaves_the_present_one() -> None:
    model = load("gemma2")
    for name in ("sdpa", "flash_attention_2", "none"):
        with pytest.raises(ValueError, match=name):
            model.set_attn_implementation(name)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        model.set_kernels("triton")
    assert model.attn_implementation == "eager"
    model.set_kernels("reference")
    assert {choice.implementation.name for choice in model.kernels()} == {"reference"}
    assert model.generate(tokens(1, 4), max_new_tokens=2).shape == (1, 6)


def test_a_package_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flash_attn built for another torch fails on import: found when the backend is chosen, with its reason."""
    import sys

    from cuformers.nn.attention.flash import package_problem

    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "flash_attn":
                raise ImportError("undefined symbol: _ZN3c105Error")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert "undefined symbol" in (package_problem() or "")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "torch.bfloat16", "float16"])
def test_dtype(dtype: object) -> None:
    model, expected = load(NAME, dtype=dtype), getattr(torch, str(dtype).removeprefix("torch."))
    assert {p.dtype for p in model.parameters()} == {expected}
    theirs = oracle(NAME).state_dict()
    assert all(torch.equal(p, theirs[n].to(expected)) for n, p in model.named_parameters())


def test_auto_takes_the_checkpoints_dtype(tmp_path: Path) -> None:
    assert load(NAME, dtype="auto").dtype is torch.float32
    load(NAME, dtype="bfloat16").save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu").dtype is torch.bfloat16
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu", torch_dtype="float32").dtype is torch.float32
    )
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu").dtype is torch.bfloat16, "from the tensors"


def test_an_override_of_the_tie_loads_both_matrices(tmp_path: Path) -> None:
    theirs = oracle("llama-mha-untied-biases")
    model = load("llama-mha-untied-biases")
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    with pytest.raises(ValueError, match=r"two different tensors.*tie_word_embeddings"):
        load("llama-mha-untied-biases", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    back = AutoModelForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False, device_map="cpu")
    assert torch.equal(back.lm_head.weight, theirs.lm_head.weight)
    with pytest.raises(ValueError, match=r"lm_head.weight"):
        load("llama-tied", tie_word_embeddings=False)  # the file has no head


def test_a_config_that_is_given_is_used() -> None:
    config = AutoConfig.from_pretrained(folder(NAME), rms_norm_eps=0.5)
    model = load(NAME, config=config)
    assert model.config is config and model.model.norm.eps == 0.5
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder(NAME), rms_norm_eps=0.5)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(1, 9)).logits, theirs(tokens(1, 9)).logits, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="rms_norm_eps"):
        load(NAME, config=config, rms_norm_eps=0.1)


def test_an_override_changes_the_model_and_what_is_saved(tmp_path: Path) -> None:
    model = load(NAME, rope_parameters={"rope_type": "linear", "factor": 2.0})
    model.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        mine, before = model(tokens(1, 20)).logits, oracle(NAME)(tokens(1, 20)).logits
        torch.testing.assert_close(mine, theirs(tokens(1, 20)).logits, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(mine, before, atol=1e-2)


def test_from_config_is_random_repeatable_and_of_the_right_size() -> None:
    config = AutoConfig.from_pretrained(folder("gemma3_text"), hidden_size=128, initializer_range=0.03)
    one, same, other = (AutoModelForCausalLM.from_config(config, seed=s, device_map="cpu") for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters()))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    for name, parameter in one.named_parameters():
        if parameter.dim() == 2:
            assert abs(parameter.std().item() / 0.03 - 1) < 0.05, name
            assert abs(parameter.mean().item()) < 0.003, name
        else:
            assert (parameter == 0).all(), f"{name}: Gemma's norms are stored around zero"
    assert not one.training and one.dtype is torch.float32
    torch.manual_seed(0)
    a = AutoModelForCausalLM.from_config(config, device_map="cpu")
    torch.manual_seed(0)
    assert torch.equal(a.lm_head.weight, AutoModelForCausalLM.from_config(config, device_map="cpu").lm_head.weight)


def test_from_config_refuses() -> None:
    config = AutoConfig.from_pretrained(folder(NAME))
    with pytest.raises(ValueError, match="max_memory"):
        AutoModelForCausalLM.from_config(config, max_memory={0: 1})
    with pytest.raises(ValueError, match=r"cuformers.AutoConfig"):
        AutoModelForCausalLM.from_config(transformers.LlamaConfig())


def test_a_model_without_a_device_map_says_where_it_went(capsys: pytest.CaptureFixture) -> None:
    from cuformers.base import log

    log._said.clear()
    model = AutoModelForCausalLM.from_pretrained(folder(NAME), progress=False)
    assert f"goes to {model.device}" in capsys.readouterr().err
