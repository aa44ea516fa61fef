"""What cuformers saves, transformers reads: the same bits, the same configuration, the same logits; and back again."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.auto.config import AutoConfig
from models.checkpoints import folder, load, oracle, shared, tokens
from models.families import FAMILIES, with_head_dim

SAYS_NOTHING = {"_name_or_path", "transformers_version", "architectures", "dtype", "_attn_implementation"}


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_what_we_save(name: str, tmp_path: Path) -> None:
    load(name).save_pretrained(tmp_path)
    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    theirs, ids = oracle(name), tokens(2, 40)
    assert type(back) is type(theirs)
    expected = theirs.state_dict()
    assert back.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in back.state_dict().items())
    with torch.no_grad():
        assert torch.equal(back(ids).logits, theirs(ids).logits)  # the configuration came through too
    for key, value in theirs.generation_config.to_diff_dict().items():
        assert key in SAYS_NOTHING or getattr(back.generation_config, key) == value, key


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_hold_the_same_tensors(name: str, tmp_path: Path) -> None:
    shared(name).save_pretrained(tmp_path)
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path, folder(name)))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_configuration_goes_around(name: str) -> None:
    config = AutoConfig.from_pretrained(folder(name))
    again = transformers.AutoConfig.for_model(**json.loads(json.dumps(config.to_dict()))).to_dict()
    expected = {k: v for k, v in with_head_dim(oracle(name).config.to_dict()).items() if k not in SAYS_NOTHING}
    assert {k: again.get(k) for k in expected} == expected
    assert AutoConfig.for_model(**config.to_dict()) == config


@pytest.mark.parametrize("name", ["llama-tied", "llama", "phi3", "gemma2"])
def test_shards_and_a_second_load(name: str, tmp_path: Path) -> None:
    shared(name).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    back = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    ours = shared(name).state_dict()
    assert all(torch.equal(tensor, ours[key]) for key, tensor in back.state_dict().items())
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().keys() == ours.keys()


def test_trained_weights_are_what_is_saved(tmp_path: Path) -> None:
    model = load("llama-tied").train()
    before = model.lm_head.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens(2, 12), labels=tokens(2, 12)).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(before, back.lm_head.weight)
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in back.named_parameters())


def test_bfloat16_is_saved_as_bfloat16(tmp_path: Path) -> None:
    load("qwen3", dtype="bfloat16").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype is torch.bfloat16
