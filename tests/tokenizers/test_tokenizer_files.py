"""Special tokens, saving and loading: what is written, Transformers reads back equal, and the other way round."""

import copy
import json
import os
import pickle
import shutil

import pytest
from tokenizer_folders import NAMES, STORIES
from tokenizer_texts import random_texts
from tokenizers import AddedToken
from transformers import AutoTokenizer as Theirs

from cuformers.auto.tokenizers.tokenizer import AutoTokenizer
from cuformers.base.errors import CheckpointError

SAME = (
    *("special_tokens_map", "all_special_tokens", "model_max_length"),
    *("padding_side", "truncation_side", "chat_template"),
)


def same(first, second) -> None:
    for name in SAME:
        assert getattr(first, name) == getattr(second, name), name
    for text in random_texts(30, list(first.all_special_tokens)):
        ids = first(text)["input_ids"]
        assert second(text)["input_ids"] == ids
        assert second.decode(ids, skip_special_tokens=True) == first.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_read_back(folders, tmp_path, name):
    ours = AutoTokenizer.from_pretrained(folders[name], padding_side="left", model_max_length=77)
    ours.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "tools"}
    ours.add_special_tokens({"mask_token": "<hole>", "additional_special_tokens": ["<x>", "<y>"]})
    ours.add_tokens(["newword"])
    files = ours.save_pretrained(tmp_path / "saved")
    assert sorted(os.path.basename(file) for file in files) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
        "tool_use.jinja",
    ]
    if (folders[name] / "config.json").exists():
        shutil.copyfile(folders[name] / "config.json", tmp_path / "saved" / "config.json")
    same(ours, AutoTokenizer.from_pretrained(tmp_path / "saved"))
    theirs = Theirs.from_pretrained(str(tmp_path / "saved"))
    same(theirs, ours)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    same(Theirs.from_pretrained(str(tmp_path / "theirs")), AutoTokenizer.from_pretrained(tmp_path / "theirs"))


def test_adding_special_tokens_equal_to_transformers(folders):
    theirs, ours = (load(folders["generic"]) for load in (Theirs.from_pretrained, AutoTokenizer.from_pretrained))
    for add in (
        lambda t: t.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<x>", "<|im_end|>"]}),
        lambda t: t.add_special_tokens({"extra_special_tokens": ["<z>"]}, replace_extra_special_tokens=False),
        lambda t: t.add_special_tokens({"sep_token": AddedToken("<sep>", lstrip=True)}),
        lambda t: t.add_tokens(["foo", "bar", "foo"]),
        lambda t: t.add_tokens("<q>", special_tokens=True),
    ):
        assert add(ours) == add(theirs)
        assert ours.all_special_tokens == theirs.all_special_tokens
        assert ours.all_special_ids == theirs.all_special_ids
        assert ours.get_vocab() == theirs.get_vocab()
        assert ours.get_added_vocab() == theirs.get_added_vocab()
        text = "a foo <x> <sep> <z><q> girl"
        assert ours(text).input_ids == theirs(text).input_ids
        ids = ours(text).input_ids
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.get_special_tokens_mask(ids) == theirs.get_special_tokens_mask(ids, already_has_special_tokens=True)
    assert ours.additional_special_tokens == theirs.extra_special_tokens
    with pytest.raises(ValueError, match="start_token"):
        ours.add_special_tokens({"start_token": "<s>"})


def test_setting_special_tokens(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["added"])
    assert tokenizer.image_token == "<image>"
    assert tokenizer.image_token_id == 400
    assert tokenizer.pad_token is None
    assert tokenizer.pad_token_id is None
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    tokenizer.pad_token_id = 2
    assert tokenizer.pad_token == "<|im_end|>"
    with pytest.raises(ValueError, match=r"add_special_tokens\(\{'pad_token': '<nowhere>'\}\)"):
        tokenizer.pad_token = "<nowhere>"
    with pytest.raises(AttributeError, match="audio_token"):
        _ = tokenizer.audio_token
    tokenizer.pad_token = None
    assert "pad_token" not in tokenizer.special_tokens_map


def test_older_folders_with_a_file_for_each_thing(folders, tmp_path):
    shutil.copytree(folders["generic"], tmp_path, dirs_exist_ok=True)
    token = {"content": "<pad>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    special = {"pad_token": token, "additional_special_tokens": ["<x>"], "bos_token": "<|im_start|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": 400, "word": 401}))
    theirs, ours = Theirs.from_pretrained(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    same(theirs, ours)
    assert ours.bos_token == "<|im_start|>"
    assert ours.convert_tokens_to_ids(["<pad>", "word", "<x>"]) == [400, 401, 402]


def test_copies_and_pickles(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["added"])
    for other in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        same(tokenizer, other)
        other.add_tokens(["another"])
        assert len(other) == len(tokenizer) + 1


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    tokenizer.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    tokenizer.add_tokens(["more"])
    with pytest.raises(CheckpointError, match="No space left"):
        tokenizer.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_template_name_can_not_leave_the_folder(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    tokenizer.chat_template = {"default": "x", "../../evil": "y"}
    with pytest.raises(ValueError, match="evil"):
        tokenizer.save_pretrained(tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json is no tokenizer"),
        ("tokenizer.json", "{}", "tokenizer.json is no tokenizer"),
        ("tokenizer_config.json", '{"a": ', "tokenizer_config.json can't be read"),
        ("tokenizer_config.json", "[1]", "holds a list"),
        ("tokenizer_config.json", '{"bos_token": {"text": "<s>"}}', "bos_token"),
    ],
)
def test_broken_folders(tmp_path, name, content, message):
    shutil.copytree(STORIES, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_older_formats_say_how_to_convert(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(CheckpointError, match=rf"only the older {name}.*[\s\S]*save_pretrained"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_subfolder(tmp_path):
    shutil.copytree(STORIES, tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path, subfolder="tokenizer")("a").input_ids == [1, 261]
