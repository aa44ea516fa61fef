"""Loading to a GPU: the bytes, the peak of its memory and of the host's, and nothing left after many loads."""

import gc

import pytest
import torch
from checkpoint_files import random_tensors, write_sharded
from torch import nn

from cuformers.checkpoint.index import Index
from cuformers.checkpoint.load import load_weights
from cuformers.checkpoint.materialize import materialize
from cuformers.checkpoint.save import save_weights
from cuformers.checkpoint.stream import read_tensor
from cuformers.cuda import memory

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
MIB = 1 << 20
SHAPES = {**{f"t{i}": (4096, 1024) for i in range(60)}, "small": (7,), "empty": (0, 2), "scalar": ()}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def folder(request, tmp_path_factory):
    tensors = list(random_tensors(SHAPES, request.param).items())
    return write_sharded(tmp_path_factory.mktemp("gpu"), [dict(tensors[:30]), dict(tensors[30:])])


def loaded(folder, dtype, device=GPU):
    model = nn.Module()
    for name, shape in SHAPES.items():
        model.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
    materialize(model, lambda name: device, lambda name: dtype)
    load_weights(model, Index.open(folder), progress=False)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bytes(folder, dtype):
    model = loaded(folder, dtype)
    for name, entry in Index.open(folder).entries.items():
        assert torch.equal(model.get_parameter(name).detach(), read_tensor(entry).to(GPU).to(dtype)), name


def test_a_model_on_both_devices(folder):
    model = nn.Module()
    for name, shape in SHAPES.items():
        model.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
    materialize(model, lambda name: GPU if name[-1] in "02468" else torch.device("cpu"), lambda name: torch.bfloat16)
    load_weights(model, Index.open(folder), progress=False)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "cuda"}
    for name, entry in Index.open(folder).entries.items():
        assert torch.equal(model.get_parameter(name).detach().cpu(), read_tensor(entry).to(torch.bfloat16)), name


def test_peaks_and_repeats(folder):
    final = sum(2 * torch.Size(shape).numel() for shape in SHAPES.values())
    loaded(folder, torch.bfloat16)  # the context, the ring's pinned memory
    gc.collect()
    memory.release_cached(GPU)
    host, reserved = memory.allocated_bytes("cpu"), []
    for _ in range(10):
        before = memory.allocated_bytes(GPU)
        memory.reset_peak(GPU)
        model = loaded(folder, torch.bfloat16)
        assert memory.allocated_bytes(GPU) - before <= 1.001 * final
        assert memory.peak_bytes(GPU) - before <= 1.05 * final
        del model
        gc.collect()
        assert memory.allocated_bytes(GPU) == before
        reserved.append(torch.cuda.memory_reserved(GPU))
    assert len(set(reserved[1:])) == 1
    assert memory.allocated_bytes("cpu") - host <= 16 * MIB


def test_saving_from_the_gpu(folder, tmp_path):
    model = loaded(folder, torch.bfloat16)
    save_weights(dict(model.named_parameters()), tmp_path, progress=False)
    for name, entry in Index.open(tmp_path).entries.items():
        assert torch.equal(read_tensor(entry), model.get_parameter(name).detach().cpu())
