"""GenerationConfig: names, values and files; Transformers reads what we write, and the other way round."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GenerationConfig as Theirs

from cuformers.base import log
from cuformers.generation import GenerationConfig
from cuformers.generation.config import FIELDS
from cuformers.generation.unsupported import METADATA, UNSUPPORTED, is_neutral

OURS_ALONE = {"seed", "presence_penalty", "frequency_penalty", "output_logprobs"}
SET = {
    "max_new_tokens": 5, "min_new_tokens": 1, "max_time": 3.5, "stop_strings": ["a", "b"], "do_sample": True,
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9, "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.02, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "bad_words_ids": [[1], [2, 3]],
    "sequence_bias": [[[4, 5], -1.5], [[6], 2.0]], "suppress_tokens": [7], "begin_suppress_tokens": [8],
    "forced_bos_token_id": 9, "forced_eos_token_id": [2], "renormalize_logits": True, "remove_invalid_values": True,
    "num_beams": 2, "length_penalty": 0.5, "early_stopping": "never", "num_return_sequences": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2, 3],
}  # fmt: skip


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The notices of the test, each once."""
    lines: list[str] = []
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr("cuformers.generation.unsupported.notice", lambda text, once=False: lines.append(text))
    monkeypatch.setattr("cuformers.generation.config_file.notice", lambda text, once=False: lines.append(text))
    return lines


def test_every_field_of_transformers_is_known() -> None:
    theirs = {name for name in vars(Theirs()) if name not in METADATA}
    assert theirs - set(FIELDS) == set(UNSUPPORTED)
    assert set(FIELDS) - theirs == OURS_ALONE


def test_transformers_defaults_are_neutral() -> None:
    for name, value in Theirs._get_default_generation_params().items():
        assert name in FIELDS or is_neutral(name, value), name


def test_fields_are_unset_until_set() -> None:
    config = GenerationConfig()
    assert all(getattr(config, name) is None for name in FIELDS)
    assert config.num_beam_groups is None
    config.max_new_tokens = 5
    assert config.max_new_tokens == 5 and config.to_diff_dict() == {"max_new_tokens": 5}
    assert repr(config) == "GenerationConfig(max_new_tokens=5)"


def test_files_are_read_by_transformers(tmp_path: Path) -> None:
    GenerationConfig(**SET, seed=3).save_pretrained(tmp_path)
    theirs = Theirs.from_pretrained(tmp_path)
    for name, value in SET.items():
        assert getattr(theirs, name) == value, name
    assert [p.name for p in tmp_path.iterdir()] == ["generation_config.json"]


def test_files_of_transformers_are_read(tmp_path: Path, said: list[str]) -> None:
    Theirs(**SET).save_pretrained(tmp_path)
    ours = GenerationConfig.from_pretrained(tmp_path, temperature=0.5)
    for name, value in {**SET, "temperature": 0.5}.items():
        assert getattr(ours, name) == value, name
    assert said == []


def test_sequence_bias_survives_both_ways(tmp_path: Path) -> None:
    bias = {(4, 5): -1.5, (6,): 2.0}
    Theirs(sequence_bias=bias).save_pretrained(tmp_path)  # writes the keys as strings, which it can't use afterwards
    assert GenerationConfig.from_pretrained(tmp_path).sequence_bias == bias
    GenerationConfig(sequence_bias=bias).save_pretrained(tmp_path)
    assert Theirs.from_pretrained(tmp_path).sequence_bias == [[[4, 5], -1.5], [[6], 2.0]]


def test_unknown_keys_of_a_file_are_reported_and_kept(tmp_path: Path, said: list[str]) -> None:
    options = {
        "top_k": 3,
        "chat_format": "raw",
        "transformers_version": "4.1",
        "_from_model_config": True,
        "num_beam_groups": 4,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(options))
    config = GenerationConfig.from_pretrained(tmp_path)
    assert len(said) == 1 and "chat_format" in said[0] and "version" not in said[0]
    assert config.num_beam_groups == 4 and config.extra["chat_format"] == "raw"
    config.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == options


@pytest.mark.parametrize("name", ["max_new_token", "topp", "temprature"])
def test_unknown_options_are_refused_with_close_names(name: str) -> None:
    config, near = GenerationConfig(), {"max_new_token": "max_new_tokens", "topp": "top_p", "temprature": "temperature"}
    acts = [
        lambda: GenerationConfig(**{name: 1}),
        lambda: config.update(**{name: 1}),
        lambda: config.copy(**{name: 1}),
        lambda: setattr(config, name, 1),
        lambda: config.get(name),
    ]
    for act in acts:
        with pytest.raises(ValueError, match=f"{name}.*{near[name]}"):
            act()
    with pytest.raises(AttributeError, match=near[name]):
        getattr(config, name)


REFUSED = [
    ("penalty_alpha", 0.6), ("guidance_scale", 1.5), ("watermarking_config", {"bias": 2.0}), ("constraints", [1]),
    ("token_healing", True), ("use_mtp", True),
    ("cache_implementation", "quantized"), ("cache_config", {"nbits": 4}), ("output_attentions", True),
    ("encoder_repetition_penalty", 1.2), ("compile_config", object()), ("num_beam_groups", 2), ("dola_layers", "low"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_unsupported_options_are_refused(name: str, value: object) -> None:
    config = GenerationConfig()
    for act in (lambda: GenerationConfig(**{name: value}), lambda: config.update(**{name: value}),
                lambda: setattr(config, name, value)):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}=.* is not supported: allowed is None"):
            act()
    assert config.to_diff_dict() == {}


def test_neutral_and_inert_values_are_taken(said: list[str]) -> None:
    GenerationConfig(num_beam_groups=1, guidance_scale=1.0, token_healing=False, use_cache=True, disable_compile=True)
    for name in ("dynamic", "static", "paged"):
        GenerationConfig(cache_implementation=name)
    assert said == []
    GenerationConfig(low_memory=True, use_cache=False, diversity_penalty=0.5)
    assert len(said) == 3 and all("no effect" in line for line in said)


BAD = [
    ("max_new_tokens", 0), ("max_new_tokens", 2.5), ("max_new_tokens", True), ("max_length", -1), ("min_length", -1),
    ("max_time", 0), ("stop_strings", ""), ("stop_strings", ["a", 3]), ("stop_strings", []), ("do_sample", 1),
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "hot"), ("top_k", -1), ("top_k", 0.5),
    ("top_p", 1.2), ("min_p", -0.1), ("top_h", 0), ("typical_p", 0), ("epsilon_cutoff", 2), ("repetition_penalty", 0),
    ("repetition_penalty", float("inf")), ("presence_penalty", 3), ("no_repeat_ngram_size", -1), ("bad_words_ids", []),
    ("bad_words_ids", [[]]), ("bad_words_ids", [[-1]]), ("bad_words_ids", [1]), ("sequence_bias", {}),
    ("sequence_bias", {(1,): "x"}), ("sequence_bias", [[1, 2]]), ("suppress_tokens", 3), ("suppress_tokens", [-3]),
    ("forced_bos_token_id", -1), ("exponential_decay_length_penalty", (1,)), ("num_return_sequences", 0),
    ("eos_token_id", "</s>"), ("eos_token_id", [1.5]), ("pad_token_id", [1]), ("seed", "x"), ("seed", []),
    ("output_scores", "yes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*allowed is"):
        GenerationConfig(**{name: value})
    config = GenerationConfig(top_k=7)
    with pytest.raises(ValueError, match=name):
        config.update(**{"top_k": 8, name: value})
    assert config.to_diff_dict() == {"top_k": 7}, "a refused update changes nothing"
    setattr(config, name, value)
    with pytest.raises(ValueError, match=name):
        config.validate()


def test_forcing_a_banned_token_is_refused() -> None:
    with pytest.raises(ValueError, match="suppress_tokens"):
        GenerationConfig(suppress_tokens=[2, 3], forced_eos_token_id=[2, 3])
    GenerationConfig(suppress_tokens=[2], forced_eos_token_id=[2, 3])


def test_copies_are_independent() -> None:
    config = GenerationConfig(bad_words_ids=[[1]], cache_implementation="static")
    for other in (config.copy(), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config and other.cache_implementation == "static"
        other.bad_words_ids.append([2])
        other.top_k = 3
        assert config.bad_words_ids == [[1]] and config.top_k is None and other != config
    assert config.copy(top_k=9).top_k == 9
    assert config.update(top_k=1, defaults_only=True) == {} and config.top_k == 1
    config.update(top_k=2, defaults_only=True)
    assert config.top_k == 1


def test_defaults_from_a_model_config() -> None:
    config = GenerationConfig.from_model_config(
        {
            "model_type": "x",
            "eos_token_id": [5],
            "text_config": {"bos_token_id": 1, "eos_token_id": 9},
            "use_cache": False,
        }
    )
    assert config.to_diff_dict() == {"bos_token_id": 1, "eos_token_id": [5]}


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        GenerationConfig.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        GenerationConfig.from_pretrained(tmp_path / "nowhere")
    for text in ('{"top_k": ', "[1]", '{"temperature": NaN}', '{"top_p": 7}'):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"generation_config\.json"):
            GenerationConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="top_kk"):
        GenerationConfig.from_pretrained(_valid(tmp_path), top_kk=1)


def test_hub_ids_are_looked_up_in_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "models--me--there" / "snapshots" / ("0" * 40)
    (folder / "inner").mkdir(parents=True)
    (folder.parent.parent / "refs").mkdir()
    (folder.parent.parent / "refs" / "main").write_text("0" * 40)
    GenerationConfig(top_k=4).save_pretrained(folder)
    GenerationConfig(top_k=5).save_pretrained(folder / "inner", "other.json")
    where = {"cache_dir": tmp_path, "local_files_only": True}
    assert GenerationConfig.from_pretrained("me/there", **where).top_k == 4
    assert GenerationConfig.from_pretrained("me/there", "other.json", subfolder="inner", **where).top_k == 5
    with pytest.raises(FileNotFoundError, match=r"me/away .*local cache"):
        GenerationConfig.from_pretrained("me/away", **where)


def _valid(folder: Path) -> Path:
    (folder / "generation_config.json").write_text("{}")
    return folder


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GenerationConfig(top_k=1).save_pretrained(tmp_path)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="space"):
        GenerationConfig(top_k=2).save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["generation_config.json"]
    assert GenerationConfig.from_pretrained(tmp_path).top_k == 1


def test_options_need_no_torch() -> None:
    code = (
        "import sys; from cuformers.generation import GenerationConfig, StopStrings, resolve, row_seeds;"
        "from cuformers import TextStreamer;"
        "resolve(GenerationConfig(seed=1, max_new_tokens=2), None, {}, 3); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
