"""Loading: bytes end where they belong, through every way; what does not fit is said before anything is copied."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoint_files import random_tensors, write_sharded, write_single
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cuformers.base.errors import CheckpointError
from cuformers.checkpoint import stream
from cuformers.checkpoint.chunks import chunk_size, chunks_of
from cuformers.checkpoint.index import Index
from cuformers.checkpoint.load import load_weights
from cuformers.checkpoint.plan import plan_load
from cuformers.checkpoint.weight_map import IDENTITY, Rename, Split, Stack, WeightMap

SHAPES = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (300, 130), "c": (), "d": (0, 3)}


class Bag(nn.Module):
    """A module with any parameter names and shapes; dots make submodules."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            *path, leaf = name.split(".")
            here: nn.Module = self
            for part in path:
                if part not in here._modules:
                    here.add_module(part, nn.Module())
                here = here.get_submodule(part)
            here.register_parameter(leaf, nn.Parameter(torch.full(shape, 77.0, dtype=dtype)))


def values(model):
    return {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_conversions_equal_torchs(tmp_path, sharded, file_dtype, dtype):
    tensors = random_tensors(SHAPES, file_dtype)
    names = list(tensors)
    halves = [{n: tensors[n] for n in names[:2]}, {n: tensors[n] for n in names[2:]}]
    folder = write_sharded(tmp_path, halves) if sharded else write_single(tmp_path, tensors)
    model = Bag(SHAPES, dtype)
    report = load_weights(model, Index.open(folder), progress=False)
    for name, value in values(model).items():
        assert value.dtype == dtype and torch.equal(value, tensors[name].to(dtype)), name
    assert report.nbytes == sum(t.nbytes for t in tensors.values()) and report.gb_per_second > 0
    assert report.missing == report.unexpected == ()


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=8),
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]), min_size=8, max_size=8
    ),
    size=st.sampled_from([16, 48, 256, 1 << 20]),
    num_slots=st.integers(1, 5),
    num_readers=st.integers(1, 3),
    odd_header=st.booleans(),
    through_ring=st.booleans(),
)
def test_any_cut_into_chunks_fills_everything(
    tmp_path_factory, shapes, dtypes, size, num_slots, num_readers, odd_header, through_ring
):
    """Both ways, in place and through the ring (whose streams are inert on the CPU), at any chunk size."""
    folder = tmp_path_factory.mktemp("cut")
    tensors = {}
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes)):
        tensors[f"t{i}"] = (torch.rand(shape, generator=torch.Generator().manual_seed(i)) * 100).to(dtype)
    write_single(folder, tensors)
    if odd_header:  # shifts the data to an odd offset, which the format allows
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        path.write_bytes((length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :])
    model = nn.Module()
    for name, tensor in tensors.items():
        wanted = torch.float32 if tensor.is_floating_point() else tensor.dtype
        model.register_buffer(name, torch.zeros(tensor.shape, dtype=wanted))
    copies = plan_load(model, Index.open(folder), IDENTITY).copies
    chunks = chunks_of(copies, size)
    assert all(0 < chunk.nbytes <= size for chunk in chunks)
    assert sum(chunk.nbytes for chunk in chunks) == sum(t.nbytes for t in tensors.values())
    done: list[int] = []
    if through_ring:
        with open(folder / "model.safetensors", "rb") as file, ThreadPoolExecutor(num_readers) as pool:
            stream.fill_through_ring(
                chunks,
                {folder / "model.safetensors": file.fileno()},
                pool,
                done.append,
                device=torch.device("cpu"),
                size=size,
                num_slots=num_slots,
            )
    else:
        stream.stream_copies(copies, chunk_bytes=size, num_readers=num_readers, advance=done.append)
    assert sum(done) == sum(chunk.nbytes for chunk in chunks)
    for name, tensor in tensors.items():
        buffer = model.get_buffer(name)
        assert torch.equal(buffer, tensor.to(buffer.dtype)), name


@pytest.mark.parametrize("total", [0, 1, 10**5, 27 * 10**7, 16 * 10**9, 10**12])
def test_the_ring_is_small_beside_the_model(total):
    size = chunk_size(total)
    assert size % 16 == 0 and size <= max(1 << 20, total / 20)
    assert size * stream.NUM_SLOTS <= 256 << 20


def snapshot(model):
    return {name: value.clone() for name, value in values(model).items()}


def test_all_faults_in_one_message_and_nothing_copied(tmp_path):
    tensors = random_tensors({"a.weight": (5, 7), "a.bias": (7,), "extra.one": (2,), "c": ()})
    tensors["b.weight"] = torch.zeros(300, 130, dtype=torch.int8)
    write_single(tmp_path, tensors)
    model = Bag(SHAPES)
    before = snapshot(model)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, Index.open(tmp_path), progress=False)
    text = str(caught.value)
    assert "1 missing in the checkpoint: d" in text
    assert "1 unexpected, the model has no place for them: extra.one" in text
    assert "a.weight (5, 7) (the model has (7, 5))" in text
    assert "b.weight torch.int8 (the model has torch.float32)" in text
    assert str(tmp_path) in text
    assert all(torch.equal(before[name], value) for name, value in values(model).items())


def test_eight_bit_floats_are_not_taken_for_weights(tmp_path):
    write_single(tmp_path, {"w": torch.ones(4).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        load_weights(Bag({"w": (4,)}, torch.bfloat16), Index.open(tmp_path), progress=False)


def test_ignore_lists_are_patterns_and_are_reported(tmp_path):
    write_single(tmp_path, random_tensors({"a.weight": (7, 5), "x.inv_freq": (3,), "y.inv_freq": (3,)}))
    model = Bag({"a.weight": (7, 5), "a.bias": (7,)})
    report = load_weights(
        model, Index.open(tmp_path), ignore_missing=["*.bias"], ignore_unexpected=["*.inv_freq"], progress=False
    )
    assert report.missing == ("a.bias",) and set(report.unexpected) == {"x.inv_freq", "y.inv_freq"}
    assert torch.all(model.get_parameter("a.bias") == 77)
    with pytest.raises(CheckpointError, match=r"x\.inv_freq"):
        load_weights(model, Index.open(tmp_path), ignore_missing=["*"], ignore_unexpected=["y.*"], progress=False)


def test_persistent_buffers_are_loaded_and_others_are_not_asked_for(tmp_path):
    model = nn.Module()
    model.register_buffer("kept", torch.zeros(3))
    model.register_buffer("own", torch.full((2,), 5.0), persistent=False)
    write_single(tmp_path, {"kept": torch.arange(3.0)})
    load_weights(model, Index.open(tmp_path), progress=False)
    assert model.kept.tolist() == [0, 1, 2] and model.own.tolist() == [5, 5]
    write_single(tmp_path, {"kept": torch.arange(3.0), "own": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"unexpected.*own"):
        load_weights(model, Index.open(tmp_path), progress=False)


def tied():
    model = Bag({"embed.weight": (6, 4), "head.weight": (6, 4)})
    model.get_submodule("head").weight = model.get_submodule("embed").weight
    return model


@pytest.mark.parametrize("names", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")])
def test_a_tied_tensor_may_come_under_any_of_its_names(tmp_path, names):
    value = torch.randn(6, 4)
    write_single(tmp_path, {name: value.clone() for name in names})
    model = tied()
    report = load_weights(model, Index.open(tmp_path), progress=False)
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert torch.equal(model.get_parameter("head.weight"), value)
    assert (report.num_tensors, report.nbytes) == (1, value.nbytes)


def test_a_tie_that_the_file_contradicts(tmp_path):
    value = torch.randn(6, 4)
    other = value.clone()
    other[5, 3] += 1
    write_single(tmp_path, {"embed.weight": value, "head.weight": other})
    model = tied()
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_weights(model, Index.open(tmp_path), progress=False)
    assert torch.all(model.get_parameter("embed.weight") == 77)
    write_single(tmp_path, {"x": value})
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: embed\.weight, head\.weight"):
        load_weights(model, Index.open(tmp_path), progress=False)


def test_odd_prefixes_need_a_rule_and_load_with_one(tmp_path):
    tensors = random_tensors(SHAPES)
    write_single(tmp_path, {f"language_model.{name}": t for name, t in tensors.items()})
    model = Bag(SHAPES)
    with pytest.raises(CheckpointError, match="5 missing") as caught:
        load_weights(model, Index.open(tmp_path), progress=False)
    assert "5 unexpected" in str(caught.value)
    load_weights(model, Index.open(tmp_path), WeightMap([Rename("language_model.{*x}", "{*x}")]), progress=False)
    assert all(torch.equal(value, tensors[name]) for name, value in values(model).items())


def test_two_names_for_one_place_are_refused(tmp_path):
    write_single(tmp_path, {"old.w": torch.ones(2), "w": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"given twice: w from (old\.)?w and (old\.)?w"):
        load_weights(Bag({"w": (2,)}), Index.open(tmp_path), WeightMap([Rename("old.{*x}", "{*x}")]), progress=False)


SPLIT = WeightMap([Split("qkv.{k}", ("q.{k}", "k.{k}", "v.{k}"))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_tensor_is_split(tmp_path, dtype):
    fused = torch.randn(10, 3)
    write_single(tmp_path, {"qkv.weight": fused})
    model = Bag({"q.weight": (6, 3), "k.weight": (2, 3), "v.weight": (2, 3)}, dtype)
    load_weights(model, Index.open(tmp_path), SPLIT, progress=False)
    parts = fused.to(dtype).split([6, 2, 2])
    for name, part in zip("qkv", parts):
        assert torch.equal(model.get_parameter(f"{name}.weight"), part)
    with pytest.raises(CheckpointError, match=r"of another shape: qkv\.weight"):
        load_weights(Bag({n + ".weight": (3, 3) for n in "qkv"}), Index.open(tmp_path), SPLIT, progress=False)


STACK = WeightMap([Stack("experts.{index}.up", "experts.up")])


def test_single_experts_are_stacked_and_a_missing_one_is_named(tmp_path):
    experts = torch.randn(11, 4, 3)
    files = {f"experts.{i}.up": experts[i].clone() for i in range(11)}
    write_single(tmp_path, files)
    model = Bag({"experts.up": (11, 4, 3)})
    load_weights(model, Index.open(tmp_path), STACK, progress=False)
    assert torch.equal(model.get_parameter("experts.up"), experts)
    with pytest.raises(CheckpointError, match=r"no such slice"):
        load_weights(Bag({"experts.up": (10, 4, 3)}), Index.open(tmp_path), STACK, progress=False)
    del files["experts.7.up"]
    write_single(tmp_path, files)
    with pytest.raises(CheckpointError, match=r"1 missing in the checkpoint: experts\.7\.up"):
        load_weights(model, Index.open(tmp_path), STACK, progress=False)


HALVES = {"gate": slice(0, 4), "up": slice(4, 8)}
PAIRS = WeightMap([Stack(("experts.{index}.gate", "experts.{index}.up"), "both")])


def test_gate_and_up_of_single_experts_become_one_stack(tmp_path):
    both = torch.randn(5, 8, 3)
    files = {f"experts.{i}.{n}": both[i, r].clone() for i in range(5) for n, r in HALVES.items()}
    write_single(tmp_path, files)
    model = Bag({"both": (5, 8, 3)})
    load_weights(model, Index.open(tmp_path), PAIRS, progress=False)
    assert torch.equal(model.get_parameter("both"), both)
    del files["experts.3.up"]
    write_single(tmp_path, files)
    with pytest.raises(CheckpointError, match=r"1 missing in the checkpoint: experts\.3\.up"):
        load_weights(model, Index.open(tmp_path), PAIRS, progress=False)


def test_a_stack_may_be_whole_in_the_file_but_not_also_in_parts(tmp_path):
    both = torch.randn(5, 8, 3)
    write_single(tmp_path, {"both": both})
    model = Bag({"both": (5, 8, 3)})
    load_weights(model, Index.open(tmp_path), PAIRS, progress=False)
    assert torch.equal(model.get_parameter("both"), both)
    write_single(tmp_path, {"both": both, "experts.2.up": both[2, 4:].clone()})
    with pytest.raises(CheckpointError, match=r"1 given twice: both from"):
        load_weights(model, Index.open(tmp_path), PAIRS, progress=False)


@pytest.mark.parametrize("through_ring", [False, True])
def test_a_file_cut_short_while_it_is_read(tmp_path, through_ring):
    write_single(tmp_path, random_tensors({"w": (400, 400)}))
    index = Index.open(tmp_path)
    path = tmp_path / "model.safetensors"
    with open(path, "r+b") as file:
        file.truncate(300_000)
    copies = plan_load(Bag({"w": (400, 400)}), index, IDENTITY).copies
    with pytest.raises(CheckpointError, match="cut it short") as caught:
        if through_ring:
            with open(path, "rb") as file, ThreadPoolExecutor(2) as pool:
                stream.fill_through_ring(
                    chunks_of(copies, 16384),
                    {path: file.fileno()},
                    pool,
                    lambda amount: None,
                    device=torch.device("cpu"),
                    size=16384,
                    num_slots=3,
                )
        else:
            stream.stream_copies(copies, chunk_bytes=16384)
    assert str(path) in str(caught.value)


def test_a_file_that_vanishes_or_may_not_be_read(tmp_path, monkeypatch):
    write_single(tmp_path, random_tensors({"w": (4,)}))
    index = Index.open(tmp_path)

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(stream.os, "open", refuse)
        with pytest.raises(CheckpointError, match="Permission denied"):
            load_weights(Bag({"w": (4,)}), index, progress=False)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        load_weights(Bag({"w": (4,)}), index, progress=False)
