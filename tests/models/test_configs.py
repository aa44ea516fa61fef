"""config.json: the real ones are understood to the last weight, and what can't be a model is refused by name."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from paths import SHARED

from cuformers.auto.config import AutoConfig
from cuformers.auto.model import build
from cuformers.models.registry import find, specs
from cuformers.models.state_space_config import StateSpaceConfig
from models.checkpoints import folder
from models.families import FAMILIES, with_head_dim

REAL = sorted((SHARED / "data/configs/hf").glob("*/config.json"))
QUANTIZED = sorted((SHARED / "data/configs/quantized").glob("*config.json"))
SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def model_type(file: Path) -> str:
    return json.loads(file.read_text()).get("model_type", "")


def write(folder: Path, text: str) -> Path:
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize("file", [f for f in REAL if model_type(f) in specs()], ids=lambda f: f.parent.name)
def test_real_configs_have_transformers_weights(file: Path, tmp_path: Path) -> None:
    """Of a quantized checkpoint, as it would be without that."""
    raw = json.loads(file.read_text())
    raw.pop("quantization_config", None)
    write(tmp_path, json.dumps(raw))
    config = AutoConfig.from_pretrained(tmp_path)
    ours = build(find(config.model_type), config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    shapes = {name: p.shape for name, p in theirs.named_parameters()}
    named = {name: p.shape for name, p in ours.named_parameters()}
    if isinstance(config, StateSpaceConfig):  # whose modules are called what other models' are
        named = {ours.spec.weight_map.to_file(name)[0]: shape for name, shape in named.items()}
    assert named == shapes
    assert ours.num_parameters() == theirs.num_parameters()


@pytest.mark.parametrize("file", [f for f in REAL if model_type(f) not in specs()], ids=lambda f: f.parent.name)
def test_other_real_configs_are_told_what_there_is(file: Path) -> None:
    with pytest.raises(ValueError, match=rf"model_type='{model_type(file)}'.*gemma2.*llama.*qwen3"):
        AutoConfig.from_pretrained(file.parent)


@pytest.mark.parametrize("file", [f for f in QUANTIZED if model_type(f) in specs()], ids=lambda f: f.name)
def test_real_quantized_configs(file: Path, tmp_path: Path) -> None:
    raw = json.loads(file.read_text())
    write(tmp_path, file.read_text())
    if not raw.get("quantization_config"):
        assert AutoConfig.from_pretrained(tmp_path).hidden_size == raw["hidden_size"]
        return
    with pytest.raises(ValueError, match="quantized"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("method", [{"quant_method": n} for n in ("gptq", "fp8", "mxfp4")], ids=str)
def test_quantized_configs_are_refused_by_method(method: dict, tmp_path: Path) -> None:
    write(tmp_path, json.dumps({"model_type": "llama", **SMALL, "quantization_config": method}))
    with pytest.raises(ValueError, match=rf"quantized \({method['quant_method']}\)"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("text, says", [
    ("[1, 2]", "must hold a JSON object, and holds a list"),
    ("{", "not valid JSON"),
    ('{"hidden_size": 16}', "model_type=None"),
    ('{"model_type": 3}', "model_type=3"),
    ('{"model_type": "llama", "rms_norm_eps": NaN}', "rms_norm_eps=nan"),
    ('{"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": Infinity}}', "factor=inf"),
    ('{"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [NaN]}}', r"short_factor\[0\]=nan"),
])  # fmt: skip
def test_files_that_are_no_config(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        AutoConfig.from_pretrained(write(tmp_path, text))


ROPE = "rope_parameters"
BAD = [
    ("llama", {"vocab_size": -1}, "vocab_size=-1"),
    ("llama", {"vocab_size": "32"}, "vocab_size='32'"),
    ("llama", {"hidden_size": True}, "hidden_size=True"),
    ("llama", {"hidden_size": 16.5}, "hidden_size=16.5"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads=0"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
    ("llama", {"initializer_range": -0.1}, "initializer_range=-0.1"),
    ("llama", {"attention_dropout": -0.1}, "attention_dropout=-0.1"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
    ("llama", {"dtype": "float99"}, "dtype='float99'"),
    ("llama", {"dtype": "int8"}, "dtype='int8'"),
    ("llama", {"head_dim": 7}, "rotary dimensions=7"),
    ("mistral", {"sliding_window": 0}, "sliding_window=0"),
    ("mistral", {"sliding_window": -4}, "sliding_window=-4"),
    ("qwen2", {"layer_types": ["full_attention"]}, r"layer_types\)=1.*num_hidden_layers=2"),
    ("qwen2", {"layer_types": ["linear_attention"] * 2}, "layer_types='linear_attention'"),
    ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers\)=1"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
    ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("granite", {"logits_scaling": 0.0}, "logits_scaling=0.0"),
    ("llama", {ROPE: [1]}, "rope_parameters"),
    ("llama", {ROPE: {"rope_theta": -1}}, "rope_theta'.=-1"),
    ("llama", {ROPE: {"rope_theta": "abc"}}, "rope_theta'.='abc'"),
    ("llama", {ROPE: {"rope_type": "spiral"}}, "rope_type='spiral'.*llama3.*"),
    ("llama", {ROPE: {"rope_type": "linear"}}, "factor'.=None"),
    ("llama", {ROPE: {"rope_type": "linear", "factor": "2"}}, "factor'.='2'"),
    ("llama", {ROPE: {"rope_type": "linear", "factor": 0.0}}, "factor'.=0.0"),
    ("llama", {ROPE: {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}}, "high_freq"),
    ("llama", {ROPE: {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}}, r"short_factor\)=1"),
    ("llama", {ROPE: {"rope_type": "longrope", "short_factor": 3, "long_factor": [1.0] * 4}}, "short_factor'.=3"),
    ("llama", {ROPE: {"partial_rotary_factor": 2.0}}, "partial_rotary_factor'.=2.0"),
    ("llama", {ROPE: {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, "rotary dimensions=2"),
]


@pytest.mark.parametrize("kind, values, says", BAD, ids=lambda v: str(v)[:60])
def test_values_that_can_be_no_model(kind: str, values: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        AutoConfig.for_model(kind, **{**SMALL, **values})


def test_a_change_that_does_not_fit_is_seen_when_the_model_is_built() -> None:
    config = AutoConfig.for_model("gemma2", **SMALL)
    config.num_hidden_layers = 1
    with pytest.raises(ValueError, match=r"layer_types\)=2.*num_hidden_layers=1"):
        build(find("gemma2"), config)


def test_unknown_keys_are_said_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path, json.dumps({"model_type": "llama", **SMALL, "flux": 3, "use_cache": True}))
    config = AutoConfig.from_pretrained(tmp_path)
    said = capsys.readouterr().err
    assert "flux" in said and "use_cache" not in said
    assert config.to_dict()["flux"] == 3


@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_our_families_have_no_unknown_key(name: str, capsys: pytest.CaptureFixture) -> None:
    AutoConfig.from_pretrained(folder(name))
    assert "without meaning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", FAMILIES)
def test_older_files_are_completed_as_by_transformers(name: str, tmp_path: Path) -> None:
    """Without layer_types and the like, and with rotary settings in the older keys."""
    raw = json.loads((folder(name) / "config.json").read_text())
    for key in ("layer_types", "no_rope_layers", "head_dim" if name == "llama" else ""):
        raw.pop(key, None)
    rope = raw.get("rope_parameters")
    if rope and "rope_theta" in rope:
        raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope if rope["rope_type"] != "default" else None}
        raw |= {k: rope[k] for k in ("partial_rotary_factor",) if k in rope}
        del raw["rope_parameters"]
    elif rope:  # Gemma 3: one set for each kind of layer
        del raw["rope_parameters"]
        raw["rope_theta"], raw["rope_local_base_freq"] = (
            rope[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")
        )
    ours = AutoConfig.from_pretrained(write(tmp_path, json.dumps(raw))).to_dict()
    theirs = with_head_dim(transformers.AutoConfig.from_pretrained(tmp_path).to_dict())
    for key in ("layer_types", "no_rope_layers", "rope_parameters", "head_dim", "num_key_value_heads"):
        assert key not in theirs or ours[key] == theirs[key], key


OLD, NEW = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters"


@pytest.mark.parametrize("file, given, theta, factor", [
    (OLD, {}, 5e5, 2.0),
    (OLD, {NEW: {"rope_type": "linear", "factor": 4.0}}, 5e5, 4.0),
    (OLD, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 5e5, 4.0),
    (OLD, {"rope_theta": 7e3}, 7e3, 2.0),
    ({NEW: {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}, {"rope_theta": 7e3}, 7e3, 2.0),
    ({NEW: {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
     {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 5e5, 4.0),
])  # fmt: skip
def test_rotary_overrides_count_in_both_spellings(
    file: dict, given: dict, theta: float, factor: float, tmp_path: Path
) -> None:
    write(tmp_path, json.dumps({"model_type": "llama", **SMALL, **file}))
    rope = AutoConfig.from_pretrained(tmp_path, **given).ropes["default"]
    assert (rope.rope_theta, rope.factor, rope.rope_type) == (theta, factor, "linear")


def test_one_theta_for_layers_that_have_several_is_refused() -> None:
    with pytest.raises(ValueError, match="Give rope_parameters"):
        AutoConfig.from_pretrained(folder("gemma3_text"), rope_theta=7e3)
