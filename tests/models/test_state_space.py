"""State-space models: logits, gradients and files are transformers', padded or not."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from cuformers import AutoConfig, AutoModel, AutoModelForCausalLM
from cuformers.models.mamba import Mamba2Config, MambaConfig
from models.checkpoints import tokens
from models.state_space import STATE_SPACE, folder, load, oracle

ATOL = 1e-4
LENGTHS = (1, 50, 18, 3)  # mamba2's chunks are 16 tokens, the convolutions see 3 or 4
SAYS_NOTHING = {"_name_or_path", "transformers_version", "architectures", "dtype", "_attn_implementation"}


def padded(side: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and mask."""
    width = max(LENGTHS)
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in LENGTHS])
    mask = mask if side == "right" else mask.flip(1)
    return tokens(len(LENGTHS), width, seed=seed) * mask, mask


def same(ours: Tensor, theirs: Tensor, what: str) -> None:
    worst = (ours - theirs).abs().max().item()
    print(f"{what}: max abs {worst:.1e} of {theirs.abs().max().item():.1f}")
    assert worst < ATOL, f"{what}: max abs {worst:.1e}"


@pytest.mark.parametrize("name", STATE_SPACE)
@torch.no_grad()
def test_a_rectangle(name: str) -> None:
    ids = tokens(3, 40)
    same(load(name)(ids).logits, oracle(name)(ids).logits, name)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", STATE_SPACE)
@torch.no_grad()
def test_padding_never_enters(name: str, side: str) -> None:
    """Row by row, as padding on the left leaves its traces in some of transformers' batches."""
    ids, mask = padded(side)
    found = load(name)(ids, attention_mask=mask).logits
    for row, real, logits in zip(ids, mask.bool(), found):
        same(logits[real], oracle(name)(row[real][None]).logits[0], f"{name} {side}")
        assert not logits[~real].any()


@pytest.mark.parametrize("name", STATE_SPACE)
def test_gradients(name: str) -> None:
    theirs, model = copy.deepcopy(oracle(name)).train(), load(name).train()
    ids, mask = padded("right", seed=1)
    labels = ids.masked_fill(mask == 0, -100)
    loss = theirs(ids, attention_mask=mask, labels=labels).loss
    mine = model(ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(mine, loss, rtol=1e-6, atol=0)
    (loss + mine).backward()
    names = model.spec.weight_map
    found = {names.to_file(n)[0]: p.grad for n, p in model.named_parameters()}
    expected = {n: p.grad for n, p in theirs.named_parameters()}
    assert expected.keys() == found.keys()
    for parameter, grad in expected.items():
        error = (found[parameter] - grad).norm() / grad.norm()
        assert error < 1e-3, f"{name} {parameter}: relative error {error:.1e} of a gradient of norm {grad.norm():.1e}"


@pytest.mark.parametrize("name", STATE_SPACE)
def test_transformers_reads_what_we_save(name: str, tmp_path: Path) -> None:
    load(name).save_pretrained(tmp_path)
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path, folder(name)))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    back, info = loaded
    assert not any(info.values()), info
    assert type(back) is type(oracle(name))
    with torch.no_grad():
        assert torch.equal(back(tokens(2, 20)).logits, oracle(name)(tokens(2, 20)).logits)


@pytest.mark.parametrize("name", STATE_SPACE)
def test_configuration_goes_around(name: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(folder(name))
    assert "without meaning" not in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), allow_nan=False))
    again = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    theirs = transformers.AutoConfig.from_pretrained(folder(name)).to_dict()
    expected = {k: v for k, v in theirs.items() if k not in SAYS_NOTHING}
    assert {k: again.get(k) for k in expected} == expected
    assert AutoConfig.for_model(**config.to_dict()) == config
    assert "num_attention_heads" not in config.to_dict()


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
@torch.no_grad()
def test_without_the_head(name: str, tmp_path: Path) -> None:
    ids = tokens(2, 20)
    expected = oracle(name)(ids, output_hidden_states=True).hidden_states[-1]
    model = AutoModel.from_pretrained(folder(name), dtype="float32", device_map="cpu", progress=False)
    same(model(ids).last_hidden_state, expected, name)
    model.save_pretrained(tmp_path)
    back = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(back(ids).last_hidden_state, expected)
    again = AutoModel.from_pretrained(tmp_path, dtype="float32", device_map="cpu", progress=False)
    same(again(ids).last_hidden_state, expected, f"{name} from a bare file")


def test_the_older_name_of_the_embedding_is_read(tmp_path: Path) -> None:
    held = load_file(folder("mamba") / "model.safetensors")
    held["backbone.embedding.weight"] = held.pop("backbone.embeddings.weight")
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder("mamba") / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu", progress=False)
    assert torch.equal(model.get_input_embeddings().weight, held["backbone.embedding.weight"])


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str) -> None:
    ids = tokens(2, 40)
    exact = oracle(name)(ids).logits
    theirs = (copy.deepcopy(oracle(name)).bfloat16()(ids).logits.float() - exact).norm() / exact.norm()
    model = load(name, dtype="bfloat16")
    mine = (model(ids).logits.float() - exact).norm() / exact.norm()
    assert model(ids).logits.dtype is torch.bfloat16
    assert mine < 1.25 * theirs, f"{mine:.3f} against {theirs:.3f}"


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
def test_a_new_model_forgets_slowly_and_learns(name: str) -> None:
    config = AutoConfig.from_pretrained(folder(name))
    model = AutoModelForCausalLM.from_config(config, dtype="float32", device_map="cpu", seed=3).train()
    mixer = model.model.layers[0].mixer
    bias = mixer.dt_bias if name == "mamba2" else mixer.dt_proj.bias
    steps = torch.nn.functional.softplus(bias)
    assert steps.min() > 0.0009 and steps.max() < 0.11 and steps.unique().numel() == steps.numel()
    assert torch.allclose(mixer.A_log.exp().flatten()[:8], torch.arange(1.0, 9.0)) and (mixer.D == 1).all()
    ids = tokens(4, 20)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(12):
        losses.append(model(ids, labels=ids).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_a_step_projection_that_was_replaced_is_used() -> None:
    model, ids = load("mamba"), tokens(2, 20)
    expected = model(ids).logits
    for layer in model.model.layers:
        layer.mixer.dt_proj = torch.nn.Sequential(layer.mixer.dt_proj)
    torch.testing.assert_close(model(ids).logits, expected)


def test_generation_is_refused() -> None:
    model = load("mamba2")
    assert not model.can_generate()
    with pytest.raises(ValueError, match="Mamba2ForCausalLM can't generate yet"):
        model.generate(tokens(1, 5), max_new_tokens=3)
    with pytest.raises(ValueError, match="can't generate yet"):
        model.generate(tokens(1, 5), max_new_tokens=3, num_beams=2)
    with pytest.raises(ValueError, match="can't generate yet"):
        model.generate_batch([[3, 4, 5]], max_new_tokens=3)


def test_an_attention_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="for a model without attention"):
        load("mamba", attn_implementation="sdpa")
    assert load("mamba").attn_implementation == "eager"


def test_deterministic_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="whose layers carry a state"):
        load("mamba").set_deterministic()


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (MambaConfig, {"hidden_act": "gelu"}, "hidden_act"),
        (MambaConfig, {"time_step_rank": "half"}, "time_step_rank"),
        (Mamba2Config, {"num_heads": 3}, "expand"),
        (Mamba2Config, {"n_groups": 3}, "n_groups"),
        (Mamba2Config, {"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
    ],
)
def test_configurations_that_can_be_no_model(config: type, options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**options)


def test_real_configurations_are_read(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    raw = {
        "model_type": "mamba2", "hidden_size": 2560, "num_heads": 80, "head_dim": 64, "n_groups": 1, "rms_norm": True,
        "num_hidden_layers": 64, "vocab_size": 50288, "tie_word_embeddings": True, "chunk_size": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.intermediate_size == 5120 and config.extra["chunk_size"] == 256
    assert "without meaning" not in capsys.readouterr().err
