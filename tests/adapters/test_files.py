"""PEFT's files: written, read again, refused where they do not fit, and read by PEFT itself where it is installed."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import load, oracle, shared
from safetensors.torch import load_file, save_file

from adapters.lora import FAMILIES, IDS, adapted, factors, fill, formula
from cuformers import AutoModelForCausalLM, LoraConfig
from cuformers.adapters.layer import lora_layers
from cuformers.base.errors import CheckpointError

CONFIG = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], rank_pattern={"q_proj": 3})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved adapter of llama."""
    adapted("llama", CONFIG).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def edit(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(dtype: str, tmp_path: Path) -> None:
    for config in (CONFIG, LoraConfig(target_modules="all-linear", use_rslora=True, layers_to_transform=None)):
        model = adapted("llama", config, dtype=dtype)
        model.save_pretrained(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        other = load("llama", dtype=dtype)
        other.load_adapter(tmp_path, "other")
        for pair, again in zip(factors(model).values(), factors(other, "other").values(), strict=True):
            assert all(torch.equal(one, two) for one, two in zip(pair, again))
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, other(IDS).logits)
        saved, read = model.peft_config["default"], other.peft_config["other"]
        assert read == replace(saved, inference_mode=True)
        assert not any(p.requires_grad for p in other.parameters())
        trained = load("llama", dtype=dtype)
        trained.load_adapter(tmp_path, is_trainable=True)
        assert {n for n, p in trained.named_parameters() if p.requires_grad} == {
            n for n, p in model.named_parameters() if p.requires_grad
        }


def test_what_the_files_hold(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    config = shared("llama").config
    assert len(tensors) == 4 * config.num_hidden_layers
    prefix = "base_model.model.model.layers.1"
    assert tensors[f"{prefix}.self_attn.q_proj.lora_A.weight"].shape == (3, config.hidden_size)
    assert tensors[f"{prefix}.mlp.down_proj.lora_B.weight"].shape == (config.hidden_size, 4)
    values = json.loads((folder / "adapter_config.json").read_text())
    assert values["peft_type"] == "LORA" and values["inference_mode"] is True and values["r"] == 4
    assert values["target_modules"] == ["down_proj", "q_proj"] and values["base_model_name_or_path"]


def test_several_adapters_are_saved_as_peft_does(tmp_path: Path) -> None:
    model = adapted("llama")
    model.add_adapter(LoraConfig(), "second")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert (tmp_path / "second" / "adapter_model.safetensors").is_file()
    model.save_pretrained(tmp_path / "one", selected_adapters=["second"])
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["second"]


def test_the_base_is_saved_under_its_own_names(tmp_path: Path) -> None:
    adapted("phi3").merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", device_map="cpu", progress=False)
    model = adapted("phi3")
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    model.unload().save_pretrained(tmp_path / "base")
    theirs = load_file(tmp_path / "base" / "model.safetensors")
    expected = oracle("phi3").state_dict()
    assert theirs.keys() == expected.keys() and all(torch.equal(theirs[k], expected[k]) for k in theirs)


def test_an_adapter_of_another_model_is_refused_with_all_its_faults(folder: Path, tmp_path: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    first, second, third, *_ = sorted(tensors)
    del tensors[first]
    tensors[second] = torch.zeros(3, 7)
    tensors[third] = tensors[third].to(torch.int32)
    tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = torch.zeros(3, 64)
    save_file(tensors, weights)
    model = load("llama")
    before = [n for n, _ in model.named_modules()]
    with pytest.raises(CheckpointError) as error:
        model.load_adapter(folder)
    text = str(error.value)
    assert f"missing {first}" in text and f"{second} is [3, 7]" in text and "layers.9" in text and "int32" in text
    assert [n for n, _ in model.named_modules()] == before and not model.adapters.configs
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("values, says", [
    ({"peft_type": "LOHA"}, "peft_type='LOHA'.*'LORA'"),
    ({"target_modules": ["c_attn"]}, "c_attn.*down_proj"),
    ({"use_dora": True}, "use_dora=True"),
    ({"bias": "all"}, "bias='all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"target_parameters": ["experts.up"]}, "target_parameters"),
    ({"lora_bias": True}, "lora_bias"),
    ({"init_lora_weights": "pissa"}, "pissa"),
])  # fmt: skip
def test_files_that_ask_for_what_there_is_not(values: dict, says: str, folder: Path) -> None:
    edit(folder, **values)
    model = load("llama")
    with pytest.raises(ValueError, match=says):
        model.load_adapter(folder)
    assert not lora_layers(model) and not model.adapters.configs


def test_keys_of_a_newer_peft_are_said_and_left_out(folder: Path, capfd: pytest.CaptureFixture) -> None:
    edit(folder, megatron_core="megatron.core", peft_version="9.0", runtime_config=None, use_future=True)
    model = load("llama")
    model.load_adapter(folder)
    assert "use_future" in capfd.readouterr().err
    assert model.active_adapters == ["default"]


def test_folders_that_are_not_whole(folder: Path, tmp_path: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors.*adapter_model.bin.*run code"):
        load("llama").load_adapter(folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        load("llama").load_adapter(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no adapter_config.json"):
        load("llama").load_adapter(tmp_path / "empty")


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="reads our files with the real package")


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_peft_reads_ours(peft: Any, family: str, tmp_path: Path) -> None:
    config = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM")
    model = adapted(family, config)
    model.save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(deepcopy(oracle(family)), tmp_path)
    logits = theirs(IDS).logits
    torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logits, formula(family, 3.0, factors(model)), rtol=1e-5, atol=1e-4)
    assert theirs.peft_config["default"].use_rslora


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [
    {"target_modules": "all-linear"},
    {"target_modules": r".*\.1\.mlp\..*proj"},
    {"target_modules": ["o_proj"], "layers_to_transform": [0], "rank_pattern": {"layers.0.self_attn.o_proj": 7}},
    {"target_modules": ["down_proj", "o_proj"], "exclude_modules": ["model.layers.0.mlp.down_proj"],
     "alpha_pattern": {"o_proj": 3}},
], ids=str)  # fmt: skip
@torch.no_grad()
def test_we_read_pefts(peft: Any, family: str, options: dict, tmp_path: Path) -> None:
    theirs = peft.get_peft_model(deepcopy(oracle(family)), peft.LoraConfig(r=4, lora_alpha=6, **options))
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    theirs.save_pretrained(tmp_path)
    model = load(family)
    model.load_adapter(tmp_path)
    torch.testing.assert_close(model(IDS).logits, theirs.eval()(IDS).logits, rtol=1e-5, atol=1e-4)
    model.save_pretrained(tmp_path / "again")
    one, two = (load_file(f / "adapter_model.safetensors") for f in (tmp_path, tmp_path / "again"))
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_peft_wraps_our_model(peft: Any, family: str, tmp_path: Path) -> None:
    wrapped = peft.get_peft_model(load(family), peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    wrapped.save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(deepcopy(oracle(family)), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(IDS).logits, theirs(IDS).logits, rtol=1e-5, atol=1e-4)
    wrapped.train()
    wrapped(IDS, labels=IDS).loss.backward()
    grads = [p.grad for n, p in wrapped.named_parameters() if "lora_" in n]
    assert all(g is not None and g.any() for g in grads)
    wrapped.eval()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = wrapped.generate(IDS, **options)
    merged = wrapped.merge_and_unload()
    assert torch.equal(merged.generate(IDS, **options), tokens)


@pytest.mark.parametrize("name", ["mamba-biases-untied", "mamba2"])
@torch.no_grad()
def test_files_name_modules_as_the_checkpoint_does(name: str, tmp_path: Path) -> None:
    """State spaces, whose layers Transformers has under another name."""
    from models.state_space import load as load_states
    from models.state_space import oracle as states

    model = load_states(name)
    model.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    fill(model)
    model.save_pretrained(tmp_path)
    tensors, weights = load_file(tmp_path / "adapter_model.safetensors"), dict(states(name).named_parameters())
    changed = {}
    for file, b in tensors.items():
        path, _, kind = file.removeprefix("base_model.model.").rpartition(".lora_")
        if kind == "B.weight":
            a = tensors[file.replace("lora_B", "lora_A")]
            changed[f"{path}.weight"] = weights[f"{path}.weight"] + 1.5 * b @ a
    expected = torch.func.functional_call(states(name), changed, (IDS,)).logits
    again = load_states(name)
    again.load_adapter(tmp_path)
    close = {"rtol": 1e-4, "atol": 1e-4 * expected.abs().max().item()}
    torch.testing.assert_close(model(IDS).logits, expected, **close)
    torch.testing.assert_close(again(IDS).logits, expected, **close)
    assert len(changed) >= 2 * model.config.num_hidden_layers
