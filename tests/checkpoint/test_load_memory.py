"""A load takes the model's own memory and a ring of buffers, and gives the ring back."""

import subprocess
import sys

import pytest
from checkpoint_files import random_tensors, write_sharded

MIB = 1 << 20
CODE = """
import sys, torch
from torch import nn
from cuformers.checkpoint import stream
from cuformers.checkpoint.index import Index
from cuformers.checkpoint.load import load_weights
from cuformers.checkpoint.materialize import materialize
from cuformers.cuda import memory
torch.set_num_threads(1)
stream.NUM_READERS = 2
model = nn.Module()
for i in range(20):
    model.register_parameter(f"t{i}", nn.Parameter(torch.empty(10_000, 250, device="meta")))
warm = torch.zeros(10).to(torch.bfloat16).float()
before = memory.allocated_bytes("cpu")
memory.reset_peak("cpu")
materialize(model, lambda name: torch.device("cpu"), lambda name: getattr(torch, sys.argv[2]))
for _ in range(int(sys.argv[3])):
    load_weights(model, Index.open(sys.argv[1]), progress=False)
model_bytes = sum(p.nbytes for p in model.parameters())
print(memory.peak_bytes("cpu") - before, memory.allocated_bytes("cpu") - before, model_bytes)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """200 MB in two shards."""
    tensors = list(random_tensors({f"t{i}": (10_000, 250) for i in range(20)}).items())
    return write_sharded(tmp_path_factory.mktemp("big"), [dict(tensors[:10]), dict(tensors[10:])])


@pytest.mark.parametrize(("dtype", "times"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 5)])
def test_peak_and_rest(folder, dtype, times):
    command = [sys.executable, "-c", CODE, folder, dtype, str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, rest, model = map(int, done.stdout.split())
    assert model in (200_000_000, 100_000_000) and peak >= model  # so the measure sees the model at least
    buffers = 2 * 4 * MIB  # one for each reader, where dtypes differ
    slack = 16 * MIB  # code pages read in for the first time, thread stacks
    assert peak <= model + buffers + slack
    assert rest <= model + buffers + slack
