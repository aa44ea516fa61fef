"""How implementations are chosen."""

import subprocess
import sys

import pytest
import torch

from cuformers.kernels.op import Problem
from cuformers.kernels.table import OPS, reference, select

H200 = Problem(device="cuda", capability=(9, 0), dtype=torch.bfloat16)


def test_the_gpu_gets_triton_and_the_cpu_the_reference() -> None:
    assert {c.implementation.name for c in select(H200).choices} == {"triton"}
    chosen = select(Problem(device="cpu"))
    assert {c.implementation.name for c in chosen.choices} == {"reference"}
    assert all("GPU" in c.refused["triton"] for c in chosen.choices)
    assert chosen.linear is reference().linear


def test_training_gets_the_reference() -> None:
    train = Problem(device="cuda", capability=(9, 0), dtype=torch.bfloat16, mode="train")
    names = {c.op: c.implementation.name for c in select(train).choices}
    same_kernels = {"invariant_linear", "invariant_gated_linear", "experts", "linear_cross_entropy"}
    assert {name for op, name in names.items() if op not in same_kernels} == {"reference"}
    assert {names[op] for op in same_kernels} == {"triton"}


def test_a_wish_is_granted_or_refused() -> None:
    assert select(H200, "reference").rms_norm is reference().rms_norm
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        select(Problem(device="cpu"), "triton")
    with pytest.raises(ValueError, match=r"kernels='cutlass'.*allowed"):
        select(H200, "cutlass")
    with pytest.raises(ValueError, match=r"needs compute capability 8\.0"):
        select(Problem(device="cuda", capability=(7, 5), dtype=torch.float16), "triton")


def test_importing_the_table_imports_no_triton() -> None:
    names = [op.name for op in OPS]
    assert len(names) == len(set(names))
    code = """
import sys
from cuformers.kernels.table import reference
reference()
loaded = [m for m in sys.modules if m.startswith("cuformers") and m.endswith("triton")]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
