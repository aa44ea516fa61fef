"""Layers that are streamed to the device, and hidden states that follow the weights: the same tokens either way."""

from pathlib import Path

import pytest
import torch

from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.auto.model import PreTrainedModel
from cuformers.auto.placing import needs
from cuformers.nn.offload import Offload
from cuformers.nn.spread import Spread
from tests.models.families import tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3", "qwen2_moe"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(request.param).save_pretrained(path)
    return path


def tokens(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(3, 23, device=model.device).reshape(2, 10)
    return model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0).cpu()


def load(folder: Path, **options: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **options)  # type: ignore[arg-type]


def test_streamed_layers_compute_the_same_and_go_home(folder: Path) -> None:
    model = load(folder, device_map="cpu")
    expected = tokens(model)
    Offload(list(model.model.layers)[1:3], CPU)
    homes = [p.data_ptr() for p in model.parameters()]
    assert torch.equal(tokens(model), expected)
    assert [p.data_ptr() for p in model.parameters()] == homes


def test_streamed_layers_keep_their_parameters_in_rows(folder: Path) -> None:
    model = load(folder, device_map="cpu")
    layer = model.model.layers[1]
    Offload([layer], CPU)
    q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()


def test_hidden_states_follow_the_weights(folder: Path) -> None:
    model = load(folder, device_map="cpu")
    expected = tokens(model)
    layers = list(model.model.layers)
    Spread(layers, [CPU] * len(layers), CPU)
    assert torch.equal(tokens(model), expected)


@pytest.mark.gpu
def test_what_does_not_fit_is_streamed_from_the_cpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = tokens(load(folder, device_map="cuda"))
    asked = needs(load(folder, device_map="cpu"), torch.float32)
    layers = len(asked.units) - 3
    whole = sum(asked.units.values()) + layers * asked.cache_per_layer + asked.reserve
    model = load(folder, device_map="auto", max_memory={0: whole - 1, "cpu": "8GiB"})
    assert "cpu" in model.hf_device_map.values(), model.hf_device_map
    assert "times slower" in capsys.readouterr().err
    assert torch.equal(tokens(model), expected)
    with pytest.raises(ValueError, match="spread over devices"):
        model.to("cpu")
