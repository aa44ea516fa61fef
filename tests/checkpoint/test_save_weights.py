"""Saving: bit-equal for the library and for transformers; whole or not at all; nothing stale, nothing left behind."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from checkpoint_files import random_tensors
from safetensors import safe_open
from torch import nn

from cuformers.base.errors import CheckpointError
from cuformers.checkpoint import atomic, save
from cuformers.checkpoint.atomic import write_json_atomic
from cuformers.checkpoint.header import DTYPES
from cuformers.checkpoint.index import Index
from cuformers.checkpoint.load import load_weights
from cuformers.checkpoint.save import save_weights
from cuformers.checkpoint.sizes import parse_size
from cuformers.checkpoint.stream import read_tensor
from cuformers.checkpoint.weight_map import Rename, Split, Stack, WeightMap


def read_back(folder):
    """All tensors of a folder, by the library."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    return found


def same(one, other):
    bits = [t.contiguous().flatten().view(torch.uint8) if t.numel() else t for t in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)


def every_kind():
    tensors = {
        f"t.{name}": torch.randint(0, 2, (5 * d.itemsize,), dtype=torch.uint8).view(d) for name, d in DTYPES.items()
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "strided": torch.randn(4, 6).t()[1:]}
    return tensors


@pytest.mark.parametrize("max_shard_size", ["50GB", 60, 1])
def test_bit_equal_for_the_library_and_for_us(tmp_path, max_shard_size):
    tensors = every_kind()
    files = save_weights(tensors, tmp_path, max_shard_size=max_shard_size, progress=False)
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert len(files) == 1 if max_shard_size == "50GB" else files[-1].name == "model.safetensors.index.json"
    theirs, ours = read_back(tmp_path), Index.open(tmp_path).entries
    assert set(theirs) == set(ours) == set(tensors)
    for name, tensor in tensors.items():
        assert same(theirs[name], tensor) and same(read_tensor(ours[name]), tensor), name
    for entry in ours.values():
        assert entry.offset % entry.dtype.itemsize == 0


def test_shards_are_as_full_as_allowed(tmp_path):
    tensors = {f"t{i}": torch.zeros(25) for i in range(5)}  # of 100 bytes each
    save_weights(tensors, tmp_path, max_shard_size=250, progress=False)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 500}
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 1, 2, 2, 3)]
    assert index["weight_map"] == dict(zip(tensors, names))


def test_ties_once_and_neighbours_apart(tmp_path):
    whole = torch.randn(6, 4)
    embed = nn.Parameter(whole)
    tensors = {"embed": embed, "q": whole[:4], "k": whole[4:], "head": embed, "transposed": whole[:4, :].t()}
    save_weights(tensors, tmp_path, progress=False)
    found = read_back(tmp_path)
    assert set(found) == {"embed", "q", "k", "transposed"}
    assert all(same(found[name], tensors[name].detach()) for name in found)


MAP = WeightMap(
    [
        Rename("lm.{*rest}", "model.{*rest}"),
        Split("qkv.{kind}", ("q.{kind}", "k.{kind}")),
        Stack("experts.{index}.up", "experts.up"),
        Stack(("pairs.{index}.a", "pairs.{index}.b"), "pairs"),
    ]
)
PAIRS = {f"pairs.{i}.{part}" for i in range(2) for part in "ab"}


def test_through_a_weight_map_and_back(tmp_path):
    tensors = random_tensors(
        {"model.a.w": (3, 2), "q.weight": (4, 5), "k.weight": (2, 5), "experts.up": (3, 2, 2), "x": ()}
        | {"pairs": (2, 4, 3)}
    )
    save_weights(tensors, tmp_path, weight_map=MAP, progress=False)
    found = read_back(tmp_path)
    assert set(found) == {"lm.a.w", "qkv.weight", "x", *(f"experts.{i}.up" for i in range(3)), *PAIRS}
    assert same(found["qkv.weight"], torch.cat([tensors["q.weight"], tensors["k.weight"]]))
    assert same(found["experts.2.up"], tensors["experts.up"][2])
    assert same(found["pairs.1.b"], tensors["pairs"][1, 2:])
    with pytest.raises(ValueError, match=r"k\.weight.* are not given"):
        save_weights({"q.weight": tensors["q.weight"]}, tmp_path / "new", weight_map=MAP, progress=False)
    with pytest.raises(ValueError, match=r"'lm\.b' would be saved as 'lm\.b'"):
        save_weights({"lm.b": tensors["x"]}, tmp_path / "new", weight_map=MAP, progress=False)
    assert not (tmp_path / "new").exists()


def test_what_has_no_values_or_no_dtype(tmp_path):
    with pytest.raises(ValueError, match="meta device"):
        save_weights({"w": torch.empty(3, device="meta")}, tmp_path / "new", progress=False)
    with pytest.raises(ValueError, match="complex128"):
        save_weights({"a": torch.ones(2), "w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "new", progress=False)
    assert not (tmp_path / "new").exists()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_older_save_of_another_shard_count_is_gone(tmp_path):
    tensors = random_tensors({f"t{i}": (25,) for i in range(6)})
    (tmp_path / "model-of-mine.txt").write_text("not ours")
    for size, count in ((100, 6), (300, 2), (10_000, 1), (200, 3)):
        save_weights(tensors, tmp_path, max_shard_size=size, progress=False)
        assert len(list(tmp_path.glob("*.safetensors"))) == count
        assert (tmp_path / "model.safetensors.index.json").exists() == (count > 1)
        assert all(same(read_tensor(e), tensors[n]) for n, e in Index.open(tmp_path).entries.items())
        assert "model-of-mine.txt" in names(tmp_path)


FULL = namedtuple("FULL", "total used free")(10**6, 10**6, 10)


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    tensors = random_tensors({"a": (1000,)})
    save_weights(tensors, tmp_path, progress=False)
    before = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: FULL)
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(OSError, match=r"needs 1\.0 MiB \(\d+ bytes\), the disk has 10 B") as caught:
            save_weights({"a": tensors["a"] + 1}, folder, progress=False)
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(folder)
    assert names(tmp_path) == ["model.safetensors"] and (tmp_path / "model.safetensors").read_bytes() == before


def test_a_disk_that_fills_up_while_writing(tmp_path):
    """The limit on file size makes a real write fail in the middle of the second shard."""
    code = """
import resource, sys, torch
from pathlib import Path
from cuformers.checkpoint.save import save_weights
folder = Path(sys.argv[1])
old = {"a": torch.ones(500), "b": torch.ones(500)}
save_weights(old, folder, max_shard_size=2000, progress=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
try:
    save_weights({"a": torch.zeros(500), "b": torch.zeros(5000)}, folder, max_shard_size=2000, progress=False)
except OSError as error:
    print("refused", error)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("refused") and "needs" in done.stdout and str(tmp_path) in done.stdout
    assert len(names(tmp_path)) == 3
    assert all(read_tensor(e).tolist() == [1.0] * 500 for e in Index.open(tmp_path).entries.values())


@pytest.mark.parametrize("failing", range(8))
def test_a_crash_at_any_rename_never_mixes_two_saves(tmp_path, monkeypatch, failing):
    """Whichever step of moving into place is the last, the folder loads as the old, as the new, or not at all."""
    old, new = ({f"t{i}": torch.full((25,), value) for i in range(4)} for value in (1.0, 2.0))
    for before, after in ((100, 100), (100, 200), (100, 9999), (9999, 100), (9999, 9999)):
        folder = tmp_path / f"{before}-{after}"
        save_weights(old, folder, max_shard_size=before, progress=False)
        steps = iter(range(100))

        def step(function, steps=steps):
            def counted(*args, **kwargs):
                if next(steps) == failing:
                    raise KeyboardInterrupt
                return function(*args, **kwargs)

            return counted

        with monkeypatch.context() as patched:
            patched.setattr(save.os, "replace", step(os.replace))
            patched.setattr(save.Path, "unlink", step(save.Path.unlink))
            with contextlib.suppress(KeyboardInterrupt):
                save_weights(new, folder, max_shard_size=after, progress=False)
        assert not list(folder.glob(".saving-*"))
        try:
            entries = Index.open(folder).entries
        except CheckpointError:
            continue
        values = {read_tensor(entry).unique().item() for entry in entries.values()}
        assert len(entries) == 4 and values in ({1.0}, {2.0})
        save_weights(new, folder, max_shard_size=after, progress=False)
        assert {read_tensor(e).unique().item() for e in Index.open(folder).entries.values()} == {2.0}


def test_no_permission_and_not_a_folder(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below"):
        with pytest.raises(OSError, match="is a file"):
            save_weights({"a": torch.ones(1)}, path, progress=False)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(atomic.tempfile, "mkdtemp", refuse)  # root may write everywhere, so the refusal is played
    with pytest.raises(PermissionError, match="can't write there") as caught:
        save_weights({"a": torch.ones(1)}, tmp_path / "new", progress=False)
    assert caught.value.filename == str(tmp_path) and names(tmp_path) == ["file"]


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    code = """
import os, sys, torch
from pathlib import Path
from cuformers.checkpoint import save
save.os.fsync = lambda fd: os._exit(9)
save.save_weights({"a": torch.ones(1000)}, Path(sys.argv[1]), progress=False)
"""
    assert subprocess.run([sys.executable, "-c", code, tmp_path]).returncode == 9
    assert len(names(tmp_path)) == 1 and names(tmp_path)[0].startswith(".saving-")
    save_weights({"a": torch.ones(2)}, tmp_path, progress=False)
    assert names(tmp_path) == ["model.safetensors"]


def test_json_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "config.json"
    write_json_atomic(path, {"b": 1, "a": "ä"})
    assert path.read_text() == '{\n  "b": 1,\n  "a": "ä"\n}\n'
    for bad in (float("nan"), float("inf"), object(), {"x": {1, 2}}):
        with pytest.raises(ValueError, match=r"config\.json can't be written"):
            write_json_atomic(path, {"v": bad})
    assert json.loads(path.read_text()) == {"b": 1, "a": "ä"} and names(tmp_path) == ["config.json"]


def test_transformers_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = LlamaForCausalLM(config)
    load_weights(ours, Index.open(tmp_path / "theirs"), progress=False)
    for name, tensor in theirs.state_dict().items():
        assert same(ours.state_dict()[name], tensor), name
    save_weights(ours.state_dict(), tmp_path / "ours", max_shard_size="5KB", progress=False)
    write_json_atomic(tmp_path / "ours" / "config.json", json.loads((tmp_path / "theirs" / "config.json").read_text()))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, tensor in theirs.state_dict().items():
        assert same(again.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1KB", 1000),
        ("1KiB", 1024),
        ("20GiB", 20 << 30),
        ("1.5gb", 1_500_000_000),
        (" 7 ", 7),
        (0, 0),
        ("2 TB", 2 * 10**12),
    ],
)
def test_sizes(text, count):
    assert parse_size("x", text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1PB", "1 G", "1e3", -1, 1.5, None, True, [1]])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="max_shard_size="):
        parse_size("max_shard_size", text)
