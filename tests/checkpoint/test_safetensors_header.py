"""Our reading of safetensors files: equal to the library's on good files, a CheckpointError on each kind of bad one."""

import json
import os
import struct

import pytest
import torch
from checkpoint_files import random_tensors, raw_file, write_index, write_sharded, write_single
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from cuformers.base.errors import CheckpointError
from cuformers.checkpoint.header import DTYPES, read_header
from cuformers.checkpoint.index import Index
from cuformers.checkpoint.stream import read_tensor


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []


def sample(dtype):
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(2, 3)


def test_every_dtype_and_shape_reads_as_the_library_reads_it(tmp_path):
    tensors = {f"t.{name}": sample(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "umlaut.ä": torch.arange(5)}
    write_single(tmp_path, tensors)
    index = Index.open(tmp_path)
    assert set(index.entries) == set(tensors)
    assert index.metadata == {"format": "pt"}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for name, entry in index.entries.items():
            theirs, ours = file.get_tensor(name), read_tensor(entry)
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert bits(ours) == bits(theirs) == bits(tensors[name])


GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]},
}


def changed(name, **fields):
    return {**GOOD, name: {**GOOD[name], **fields}}


CORRUPT = {
    "empty file": (b"", None, "too few"),
    "short length": (b"\x01\x02", None, "too few"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", None, "Git LFS"),
    "huge header": (struct.pack("<Q", 1 << 40) + b"{}", None, "header claims"),
    "header cut": (struct.pack("<Q", 900) + b'{"a"', None, "truncated: the header needs"),
    "html page": (b"<!DOCTYPE html><html>...", None, "header claims"),
    "not json": (None, b"{nope", "not JSON"),
    "not utf-8": (None, b'{"\xff": 1}', "not JSON"),
    "nested deep": (None, b"[" * 100_000, "not JSON"),
    "a list": (None, [], "JSON list"),
    "twice": (None, b'{"a":{"dtype":"U8","shape":[12],"data_offsets":[0,12]},"a":{"dtype":"U8"}}', "'a' twice"),
    "metadata": (None, {**GOOD, "__metadata__": {"x": 1}}, "__metadata__"),
    "field missing": (None, {"a": {"dtype": "F32", "shape": [3]}}, "exactly dtype"),
    "unknown dtype": (None, changed("a", dtype="F7"), "F7"),
    "dtype no string": (None, changed("a", dtype=[1]), "known are"),
    "negative shape": (None, changed("a", shape=[-2]), "shape"),
    "bool shape": (None, changed("a", shape=[True, 2]), "shape"),
    "float shape": (None, changed("a", shape=[2.0]), "shape"),
    "offsets reversed": (None, changed("a", data_offsets=[8, 0]), "needs 8 bytes"),
    "offsets wrong": (None, changed("a", data_offsets=[0, 4]), "needs 8 bytes"),
    "offsets negative": (None, changed("a", data_offsets=[-8, 0]), "data_offsets"),
    "overlap": (None, changed("b", data_offsets=[4, 8]), "overlaps"),
    "hole": (None, changed("b", data_offsets=[9, 13]), "hole"),
    "hole at the start": (None, {"b": {**GOOD["b"], "data_offsets": [1, 5]}}, "hole"),
    "trailing": (None, {"a": GOOD["a"]}, "4 bytes follow"),
    "truncated": (None, changed("b", shape=[5], data_offsets=[8, 13]), "truncated"),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_each_corruption_is_named_with_its_file(tmp_path, kind):
    whole, header, message = CORRUPT[kind]
    path = tmp_path / "model.safetensors"
    if whole is not None:
        path.write_bytes(whole)
    else:
        raw_file(path, header, bytes(12))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_the_good_header_is_good(tmp_path):
    entries = read_header(raw_file(tmp_path / "x", GOOD, bytes(12))).entries
    assert [e.name for e in entries] == ["a", "b"]
    assert [e.offset - entries[0].offset for e in entries] == [0, 8]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_makes_it_crash_or_read_outside_the_file(tmp_path_factory, data):
    """Cut or changed anywhere, a file gives a CheckpointError or entries that lie inside it."""
    whole = bytearray(save(random_tensors({"w": (3, 4), "b": (5,)}), metadata={"format": "pt"}))
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        whole[data.draw(st.integers(0, 200))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damage") / "x.safetensors"
    path.write_bytes(whole)
    try:
        entries = read_header(path).entries
    except CheckpointError as error:
        assert str(path) in str(error)
        return
    assert all(e.offset >= 8 and e.offset + e.nbytes <= len(whole) for e in entries)


def test_permission_and_absence(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="does not exist"):
        read_header(tmp_path / "none.safetensors")
    path = write_single(tmp_path, {"a": torch.ones(1)}) / "model.safetensors"

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)  # root may read everything, so the refusal is played
    with pytest.raises(CheckpointError, match="permission denied"):
        read_header(path)


def two_shards(folder):
    tensors = random_tensors({"a": (2, 3), "b": (4,), "c": (5,)})
    return write_sharded(folder, [{"a": tensors["a"]}, {"b": tensors["b"], "c": tensors["c"]}]), tensors


def test_shards_read_as_one(tmp_path):
    folder, tensors = two_shards(tmp_path)
    index = Index.open(folder)
    assert index.nbytes == sum(t.nbytes for t in tensors.values())
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(index.entries[name]), tensor)


def test_a_missing_shard_is_named(tmp_path):
    folder, _ = two_shards(tmp_path)
    os.remove(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"1 are missing: model-00002-of-00002\.safetensors"):
        Index.open(folder)


def test_an_index_that_names_what_its_shard_lacks(tmp_path):
    folder, _ = two_shards(tmp_path)
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    write_index(folder, {"a": one, "b": two, "c": one, "d": two})
    with pytest.raises(CheckpointError, match="2 tensors that their shards lack") as caught:
        Index.open(folder)
    assert "c (in " + one in str(caught.value) and "d (in " + two in str(caught.value)


def test_a_tensor_that_the_index_forgot_is_found_and_one_in_two_shards_is_refused(tmp_path):
    folder, tensors = two_shards(tmp_path / "forgot")
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    write_index(folder, {"a": one, "b": two})
    assert set(Index.open(folder).entries) == {"a", "b", "c"}
    folder = write_sharded(tmp_path / "twice", [{"a": tensors["a"], "c": tensors["c"]}, {"c": tensors["c"] + 1}])
    assert torch.equal(read_tensor(Index.open(folder).entries["c"]), tensors["c"] + 1)  # as the index says
    write_index(folder, {"a": one, "x": two})
    with pytest.raises(CheckpointError, match="'c' is in"):
        Index.open(folder)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin", 3, None])
def test_an_index_that_points_elsewhere_is_refused(tmp_path, shard):
    write_index(tmp_path, {"a": shard})
    with pytest.raises(CheckpointError, match="plain name"):
        Index.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "3"])
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="weight_map"):
        Index.open(tmp_path)


def test_pickles_are_refused_with_the_way_to_convert(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        Index.open(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        Index.open(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        Index.open(tmp_path / "none")


def test_variants_and_both_forms(tmp_path, capsys):
    write_single(tmp_path, {"a": torch.ones(2)})
    (tmp_path / "model.safetensors").rename(tmp_path / "model.fp16.safetensors")
    assert set(Index.open(tmp_path, variant="fp16").entries) == {"a"}
    with pytest.raises(CheckpointError, match=r"model\.fp16\.safetensors"):
        Index.open(tmp_path)
    write_single(tmp_path, {"b": torch.ones(2)})
    write_index(tmp_path, {"z": "gone.safetensors"})
    assert set(Index.open(tmp_path).entries) == {"b"}
    assert "the index is not" in capsys.readouterr().err
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]["z"] == "gone.safetensors"
