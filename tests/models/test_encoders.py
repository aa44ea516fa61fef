"""Every encoder's hidden states and gradients are transformers', padded or not, within and past the local window."""

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
from cuformers.auto.base_model import BaseModel
from cuformers.auto.placing import needs
from cuformers.base.errors import CheckpointError
from cuformers.checkpoint.needs import is_layer
from cuformers.models.registry import find
from cuformers.nn.offload import Offload
from cuformers.nn.spread import Spread
from models import checkpoints
from models.checkpoints import tokens
from models.encoders import ENCODERS, folder, load, oracle

ATOL = 1e-4
SAYS_NOTHING = {"_name_or_path", "transformers_version", "architectures", "dtype", "_attn_implementation"}
LENGTHS = (1, 90, 20)  # the rows' windows are 9 and 16, their learned positions 96


def padded(lengths: tuple[int, ...], side: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask, and positions that count from each row's first real token."""
    width = max(lengths)
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    mask = mask if side == "right" else mask.flip(1)
    return tokens(len(lengths), width, seed=seed) * mask, mask, (mask.cumsum(1) - 1).clamp(min=0)


def same(ours: Tensor, theirs: Tensor, what: str) -> None:
    worst = (ours - theirs).abs().max().item()
    print(f"{what}: max abs {worst:.1e} of {theirs.abs().max().item():.1f}")
    assert worst < ATOL, f"{what}: max abs {worst:.1e}"


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_a_rectangle(name: str, backend: str) -> None:
    model, ids = load(name, attn_implementation=backend), tokens(3, 70)
    ours, theirs = model(ids), oracle(name)(ids)
    same(ours.last_hidden_state, theirs.last_hidden_state, name)
    assert ("pooler_output" in ours) == ("pooler_output" in theirs)
    if "pooler_output" in ours:
        same(ours.pooler_output, theirs.pooler_output, "pooler")
        assert torch.equal(ours[1], ours.pooler_output)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_a_padded_batch(name: str, backend: str, side: str) -> None:
    ids, mask, positions = padded(LENGTHS, side)
    ours = load(name, attn_implementation=backend)(ids, attention_mask=mask)
    theirs = oracle(name)(ids, attention_mask=mask, position_ids=positions)
    same(ours.last_hidden_state, theirs.last_hidden_state * mask[..., None], f"{name} {side}")
    assert (ours.last_hidden_state[mask == 0] == 0).all()
    if "pooler_output" in ours and side == "right":  # transformers pools the first column, padding or not
        same(ours.pooler_output, theirs.pooler_output, "pooler")


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@torch.no_grad()
def test_rows_do_not_depend_on_where_padding_stands(name: str) -> None:
    model = load(name)
    (left, mask, _), (right, _, _) = padded(LENGTHS, "left"), padded(LENGTHS, "right")
    rows = [ids[row][where[row] != 0] for ids, where in ((left, mask),) for row in range(3)]
    right = torch.zeros_like(right)
    for row, real in enumerate(rows):
        right[row, : len(real)] = real
    one, other = model(left, attention_mask=mask), model(right, attention_mask=mask.flip(1))
    for row, real in enumerate(rows):
        n = len(real)
        torch.testing.assert_close(one.last_hidden_state[row, -n:], other.last_hidden_state[row, :n])
    if name == "bert":
        torch.testing.assert_close(one.pooler_output, other.pooler_output)


@torch.no_grad()
def test_token_types_are_used() -> None:
    ids, mask, _ = padded((30, 12), "right")
    types = (torch.arange(30) > 8).long().expand(2, 30)
    model, theirs = load("bert"), oracle("bert")(ids, attention_mask=mask, token_type_ids=types)
    ours = model(ids, attention_mask=mask, token_type_ids=types)
    same(ours.last_hidden_state, theirs.last_hidden_state * mask[..., None], "types")
    assert not torch.allclose(ours.last_hidden_state, model(ids, attention_mask=mask).last_hidden_state)


@torch.no_grad()
def test_rows_without_tokens_are_zeros() -> None:
    ids, mask = tokens(3, 7), torch.ones(3, 7, dtype=torch.long)
    mask[1] = 0
    model = load("bert")
    out = model(ids, attention_mask=mask)
    assert (out.last_hidden_state[1] == 0).all() and (out.pooler_output[1] == 0).all()
    torch.testing.assert_close(out.pooler_output[[0, 2]], model(ids[[0, 2]]).pooler_output)


@pytest.mark.parametrize("name", ENCODERS)
def test_gradients(name: str) -> None:
    theirs, model = copy.deepcopy(oracle(name)).train(), load(name).train()
    ids, mask, positions = padded((17, 25), "right", seed=1)
    goal = torch.randn(2, 25, 64, generator=torch.Generator().manual_seed(0)) * mask[..., None]
    for output in (
        theirs(ids, attention_mask=mask, position_ids=positions), model(ids, attention_mask=mask)
    ):  # fmt: skip
        loss = (output.last_hidden_state * goal).sum()
        loss = loss + output.pooler_output.square().sum() if "pooler_output" in output else loss
        loss.backward()
    expected = {n: p.grad for n, p in theirs.named_parameters()}
    found = {n: p.grad for n, p in model.named_parameters()}
    assert expected.keys() == found.keys()
    rounding = 1e-6 * max(grad.norm() for grad in expected.values())
    for parameter, grad in expected.items():
        if parameter.endswith("key.bias"):  # moves all scores of a query alike: its gradient is zero but for rounding
            assert max(grad.norm(), found[parameter].norm()) < rounding
            continue
        error = (found[parameter] - grad).norm() / grad.norm()
        assert error < 1e-3, f"{name} {parameter}: relative error {error:.1e} of a gradient of norm {grad.norm():.1e}"


def test_dropout_is_refused_rather_than_ignored() -> None:
    with pytest.raises(ValueError, match=r"hidden_dropout_prob=0\.1.*set to 0.0"):
        load("bert", hidden_dropout_prob=0.1).train()


@pytest.mark.parametrize("name", ENCODERS)
def test_transformers_reads_what_we_save(name: str, tmp_path: Path) -> None:
    load(name).save_pretrained(tmp_path)
    back, info = transformers.AutoModel.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    theirs, ids = oracle(name), tokens(2, 40)
    assert type(back) is type(theirs)
    expected = theirs.state_dict()
    assert back.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in back.state_dict().items())
    with torch.no_grad():
        assert torch.equal(back(ids).last_hidden_state, theirs(ids).last_hidden_state)
    ours, files = (load_file(path / "model.safetensors") for path in (tmp_path, folder(name)))
    assert ours.keys() == files.keys()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(theirs).__name__]


@pytest.mark.parametrize("name", ENCODERS)
def test_configuration_goes_around(name: str) -> None:
    config = AutoConfig.from_pretrained(folder(name))
    again = transformers.AutoConfig.for_model(**json.loads(json.dumps(config.to_dict()))).to_dict()
    expected = {k: v for k, v in oracle(name).config.to_dict().items() if k not in SAYS_NOTHING}
    assert {k: again.get(k) for k in expected} == expected
    assert AutoConfig.for_model(**config.to_dict()) == config


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@torch.no_grad()
def test_checkpoints_with_a_head(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Their names have a prefix; the head is left out and said, and such a BERT has no pooler."""
    model, ids = load(name, "AutoModelForMaskedLM"), tokens(2, 20)
    assert "left out, as a head's: " in capsys.readouterr().err
    whole = oracle(name, "AutoModelForMaskedLM")
    same(model(ids).last_hidden_state, whole.base_model(ids).last_hidden_state, name)
    assert "pooler_output" not in model(ids)
    assert not any(parameter.startswith("pooler") for parameter, _ in model.named_parameters())


def test_files_of_older_times(tmp_path: Path) -> None:
    """Norms are named gamma and beta, and positions are a buffer."""
    state = load_file(folder("bert") / "model.safetensors")
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
           for n, t in state.items()}  # fmt: skip
    save_file({**old, "embeddings.position_ids": torch.arange(96)[None]}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder("bert") / "config.json").read_text())
    model = AutoModel.from_pretrained(tmp_path, device_map="cpu", progress=False)
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())
    model.save_pretrained(tmp_path / "new")
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == state.keys()


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    state = load_file(folder("bert") / "model.safetensors")
    state["encoder.layer.9.output.dense.bias"] = state.pop("encoder.layer.3.output.dense.bias")
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder("bert") / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"(?s)missing.*layer\.3\.output\.dense\.bias.*unexpected.*layer\.9"):
        AutoModel.from_pretrained(tmp_path, device_map="cpu")


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "gemma3_text", "granite"])
@pytest.mark.parametrize("bare", [False, True])
@torch.no_grad()
def test_decoders_without_their_head(name: str, bare: bool, tmp_path: Path) -> None:
    whole = checkpoints.oracle(name)
    if bare:
        whole.model.save_pretrained(tmp_path)
    source = tmp_path if bare else checkpoints.folder(name)
    model = AutoModel.from_pretrained(source, dtype="float32", device_map="cpu", progress=False)
    ids, mask, positions = padded((5, 40, 17), "left")
    theirs = whole.model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    same(model(ids, attention_mask=mask).last_hidden_state, theirs * mask[..., None], name)
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in whole.model.named_parameters()}
    assert type(model).__name__ == type(whole.model).__name__
    model.save_pretrained(tmp_path / "saved")
    back, info = transformers.AutoModel.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(p, whole.model.get_parameter(n)) for n, p in back.named_parameters())


@pytest.mark.parametrize("options, says", [
    ({"token_type_ids": torch.zeros(1, 4, dtype=torch.long)}, "token_type_ids.*nothing for a modernbert model"),
    ({"use_cache": True}, "use_cache=True.*AutoModelForCausalLM"),
    ({"attention_mask": torch.ones(1, 5)}, "attention_mask"),
])  # fmt: skip
def test_what_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load("modernbert")(tokens(1, 4), **options)


def test_what_berts_refuse() -> None:
    model = load("bert")
    with pytest.raises(ValueError, match=r"position 96.*learned 96 positions.*truncation=True"):
        model(tokens(1, 97))
    with pytest.raises(ValueError, match=r"token_type_ids=.*\(1, 3\).*\(1, 4\)"):
        model(tokens(1, 4), token_type_ids=torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="deterministic"):
        model.set_deterministic()
    with pytest.raises(ValueError, match=r"'bert'.*AutoModel"):
        AutoModelForCausalLM.from_pretrained(folder("bert"))
    with pytest.raises(ValueError, match="is_decoder"):
        AutoModel.from_pretrained(folder("bert"), is_decoder=True)
    with pytest.raises(ValueError, match="generation_config"):
        AutoModel.from_pretrained(folder("bert"), generation_config=checkpoints.shared("llama").generation_config)
    with pytest.raises(TypeError, match="AutoModel makes models"):
        AutoModel()


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
def test_new_models(name: str) -> None:
    source = folder(name) if name in ENCODERS else checkpoints.folder(name)
    config = AutoConfig.from_pretrained(source)
    one, same_seed, other = (AutoModel.from_config(config, device_map="cpu", seed=seed) for seed in (1, 1, 2))
    ids = tokens(2, 9)
    with torch.no_grad():
        out = one(ids).last_hidden_state
        assert out.isfinite().all() and torch.equal(out, same_seed(ids).last_hidden_state)
        assert not torch.equal(out, other(ids).last_hidden_state)
    assert all(p.isfinite().all() for p in one.parameters())


def test_local_base_of_older_files() -> None:
    def thetas(**raw: Any) -> list[float]:
        ropes = AutoConfig.for_model("modernbert").from_dict({"num_hidden_layers": 2, **raw}).ropes
        return [ropes[kind].rope_theta for kind in ("full_attention", "sliding_attention")]

    assert thetas() == [160000.0, 10000.0]
    assert thetas(global_rope_theta=5.0, local_rope_theta=7.0) == [5.0, 7.0]
    assert thetas(global_rope_theta=5.0, local_rope_theta=None) == [5.0, 5.0]


@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_transformers_is() -> None:
    ids = tokens(2, 40)
    for name in ("bert", "modernbert"):
        exact = oracle(name)(ids).last_hidden_state
        theirs = copy.deepcopy(oracle(name)).bfloat16()(ids).last_hidden_state.float()
        ours = load(name, dtype="bfloat16")(ids).last_hidden_state.float()
        errors = [((x - exact).norm() / exact.norm()).item() for x in (ours, theirs)]
        assert errors[0] < 1.25 * errors[1], f"{name}: {errors}"


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
def test_parts_that_are_placed(name: str) -> None:
    """They hold each weight once; what is around the layers stays together; nothing is reckoned for a cache."""
    source = folder(name) if name in ENCODERS else checkpoints.folder(name)
    model = AutoModel.from_pretrained(source, dtype="float32", device_map="cpu", progress=False)
    asked = needs(model, torch.float32)
    assert sum(asked.units.values()) == model.get_memory_footprint()
    assert asked.cache_per_layer == 0 and len(model.backbone.stack) == sum(map(is_layer, asked.units)) == 4
    assert asked.tied == (tuple(unit for unit in asked.units if not is_layer(unit)),)
    assert set(model.hf_device_map) == set(asked.units)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@torch.no_grad()
def test_layers_that_move(name: str) -> None:
    model, ids = load(name), tokens(2, 30)
    expected, layers, cpu = model(ids).last_hidden_state, list(model.backbone.stack), torch.device("cpu")
    Spread(layers, [cpu] * 4, cpu)
    Offload(layers[1:3], cpu)
    assert torch.equal(model(ids).last_hidden_state, expected)


@torch.no_grad()
def test_a_copy_is_a_model_of_its_own() -> None:
    model, ids = load("bert"), tokens(1, 5)
    before = model(ids).last_hidden_state
    twin = copy.deepcopy(model)
    twin.embeddings.word_embeddings.weight.zero_()
    assert torch.equal(model(ids).last_hidden_state, before)
    assert not torch.equal(twin(ids).last_hidden_state, before)
    assert model.to(torch.bfloat16)(ids).last_hidden_state.dtype is torch.bfloat16


PUBLISHED: dict[str, dict[str, Any]] = {
    "bert": {
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
        "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
    },
    "modernbert": {
        "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
        "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False,
        "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "gradient_checkpointing": False, "hidden_activation": "gelu",
        "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 1152,
        "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert",
        "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22,
        "pad_token_id": 50283, "position_embedding_type": "absolute", "sep_token_id": 50282,
        "tie_word_embeddings": True, "torch_dtype": "float32", "transformers_version": "4.47.0.dev0",
        "vocab_size": 50368,
    },
}  # fmt: skip
"""config.json of the base models, with the keys of their time."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config, theirs = AutoConfig.from_pretrained(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert capsys.readouterr().err == ""  # every key is understood
    if name == "modernbert":
        assert config.layer_types == theirs.layer_types
        thetas = {kind: rope["rope_theta"] for kind, rope in theirs.rope_parameters.items()}
        assert {kind: rope.rope_theta for kind, rope in config.ropes.items()} == thetas
    spec = find(name)
    with torch.device("meta"):
        ours, reference = BaseModel(spec, config), transformers.AutoModel.from_config(theirs)
    shapes = {n: p.shape for n, p in reference.named_parameters()}
    assert {n: p.shape for n, p in ours.named_parameters()} == shapes
