"""Ids, texts and attributes equal to Transformers' for every kind of tokenizer, on texts that break tokenizers."""

import json
import lzma
import random
import shutil
from pathlib import Path

import pytest
from paths import SHARED
from tokenizer_folders import NAMES
from tokenizer_texts import random_texts
from transformers import AutoTokenizer as Theirs

from cuformers.auto.tokenizers.tokenizer import AutoTokenizer

ATTRIBUTES = (
    *("special_tokens_map", "all_special_tokens", "all_special_ids", "extra_special_tokens", "vocab_size"),
    *("model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces", "model_input_names"),
    *("bos_token", "bos_token_id", "eos_token", "eos_token_id", "pad_token", "pad_token_id", "unk_token_id"),
    *("mask_token_id", "cls_token", "sep_token_id", "chat_template", "add_bos_token", "add_eos_token"),
)
PUBLISHED = {
    "bert_minilm": "bert",
    "cl100k": None,
    "deepseek_v3": "deepseek_v3",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "gptoss": "gpt_oss",
    "mistral_tekken_v3": "mistral",
    "qwen3": "qwen3",
    "smollm2": "llama",
}


def assert_equal(folder: Path, count: int) -> None:
    theirs, ours = Theirs.from_pretrained(str(folder)), AutoTokenizer.from_pretrained(folder)
    for name in ATTRIBUTES:
        expected = getattr(theirs, name)
        assert getattr(ours, name) == (list(expected) if isinstance(expected, tuple) else expected), name
    assert len(ours) == len(theirs)
    added = {i: repr(token) for i, token in theirs.added_tokens_decoder.items()}
    assert {i: repr(token) for i, token in ours.added_tokens_decoder.items()} == added
    special = [str(token) for token in list(theirs.added_tokens_decoder.values())[:40]]
    rng = random.Random(1)
    for text in random_texts(count, special):
        for with_special in (True, False):
            options = {"add_special_tokens": with_special, "return_offsets_mapping": True}
            expected, got = theirs(text, **options), ours(text, **options)
            assert dict(got) == dict(expected), text
            for skip in (True, False):
                for clean in (None, True):
                    options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": clean}
                    assert ours.decode(got.input_ids, **options) == theirs.decode(got.input_ids, **options), text
        ids = [rng.randrange(len(ours) + 3) for _ in range(12)]
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.convert_ids_to_tokens(ids, True) == theirs.convert_ids_to_tokens(ids, True)
        assert ours.tokenize(text) == theirs.tokenize(text)
        tokens = [*ours.tokenize(text), "not a token"]
        assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
        assert ours.convert_tokens_to_string(tokens) == theirs.convert_tokens_to_string(tokens)


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_transformers(folders, name):
    assert_equal(folders[name], 60)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers_are_equal(tmp_path, name):
    source = SHARED / "data" / "tokenizers" / name
    if not source.is_dir():
        pytest.skip("needs the shared data")
    for path in source.iterdir():
        if path.suffix == ".xz":
            (tmp_path / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        else:
            shutil.copyfile(path, tmp_path / path.name)
    if PUBLISHED[name]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": PUBLISHED[name]}))
    assert_equal(tmp_path, 40)


def test_llama_class_over_byte_level_pipeline_keeps_its_spaces(folders, tmp_path):
    # without config.json Transformers 5.17 puts Llama's pipeline here, and DeepSeek's texts lose their spaces
    shutil.copytree(folders["deepseek"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("a little girl").input_ids) == "a little girl"


@pytest.mark.parametrize("options", [{"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
@pytest.mark.parametrize("name", ["generic", "mistral", "gpt2"])
def test_bos_and_eos_on_request(folders, name, options):
    theirs = Theirs.from_pretrained(str(folders[name]), **options)
    ours = AutoTokenizer.from_pretrained(folders[name], **options)
    for pair in (None, "girl"):
        assert ours("a little", pair).input_ids == theirs("a little", pair).input_ids
    theirs.add_eos_token = ours.add_eos_token = False
    assert ours("a little").input_ids == theirs("a little").input_ids
    assert ours.num_special_tokens_to_add() == 1


def test_options_override_the_files(folders):
    options = {
        "pad_token": "<|im_end|>",
        "padding_side": "left",
        "truncation_side": "left",
        "model_max_length": 9,
        "mask_token": "<mask>",
        "additional_special_tokens": ["<tool>"],
        "chat_template": "{{ messages[0].content }}",
    }
    theirs = Theirs.from_pretrained(str(folders["generic"]), **options)
    ours = AutoTokenizer.from_pretrained(folders["generic"], **options)
    for name in ATTRIBUTES:
        assert getattr(ours, name) == getattr(theirs, name), name
    text = "a little girl named Lily <mask> and <tool>"
    call = {"padding": "max_length", "truncation": True}
    assert dict(ours(text, **call)) == dict(theirs(text, **call))


def test_prefix_space_on_request(folders):
    ours = AutoTokenizer.from_pretrained(folders["generic"], add_prefix_space=True)
    assert (
        ours("little").input_ids
        == ours(" little").input_ids
        == AutoTokenizer.from_pretrained(folders["gpt2-space"])("little").input_ids
    )
    with pytest.raises(ValueError, match="add_prefix_space"):
        AutoTokenizer.from_pretrained(folders["bert-padded"], add_prefix_space=True)
