"""The kernel of chunk_attention for capability 9.0, without such a GPU: its text on the CPU, and what becomes of it."""

import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cuformers.kernels.chunk_attention import (
    hopper,
    hopper_items_kernel,
    hopper_kernel,
    hopper_load_kernel,
    reference,
    triton,
)

from . import warpgroups
from .cases import all_cases
from .chunk_cases import CHUNKS, ChunkShape, chunk
from .judge import TOLERANCE, Case, error, poisoned
from .test_compile import FLOATS, POINTERS
from .test_gpu import REAL

MODULES = [hopper_items_kernel, hopper_load_kernel, hopper_kernel]
LONG = (
    ChunkShape(((150, 333), (0, 0), (64, 64), (1, 500)), 4, 2, 64, page=32, padding=70),
    ChunkShape(((150, 333), (64, 200)), 4, 1, 64, page=64, window=70, sinks=True),
    ChunkShape(((300, 300),), 6, 2, 64, page=16, window=40, softcap=5.0),
)
BUILDS: list[dict[str, Any]] = [
    {"D": 128, "G": 2, "PAGE": 64},
    {"D": 128, "G": 8, "PAGE": 256, "dtype": "fp16"},
    {"D": 96, "G": 3, "PAGE": 16, "WINDOW": True, "SOFTCAP": True, "SINKS": True},
    {"D": 64, "G": 8, "PAGE": 64, "WINDOW": True, "SINKS": True},
    {"D": 256, "G": 1, "PAGE": 32},
]


@pytest.mark.parametrize("cut", [hopper.HopperConfig(32, 2), hopper.HopperConfig(64, 3)], ids=lambda c: f"{c.block_s}")
@pytest.mark.parametrize("shape", [s for s in (*CHUNKS, *LONG) if not s.fp8], ids=str)
def test_its_text_says_what_the_reference_does(
    shape: ChunkShape, cut: hopper.HopperConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernel:
        """Stands for the compiled kernel."""

        def __getitem__(self, grid: tuple[int]) -> "Kernel":
            self.programs = grid[0]
            return self

        def __call__(self, *args: Any, num_warps: int, maxnreg: int, **constants: Any) -> None:
            pointers = [warpgroups.Pointer.to(a) if isinstance(a, torch.Tensor) else a for a in args]
            pointers[1:3] = call.args[1].flatten(0, 2), call.args[2].flatten(0, 2)
            warpgroups.run(MODULES, "hopper_kernel", self.programs, *pointers, **constants)

    monkeypatch.setattr(hopper, "hopper_kernel", Kernel())
    monkeypatch.setattr(hopper, "_rows", lambda *_: None)
    monkeypatch.setattr(hopper, "sms", lambda _: 3)
    torch.manual_seed(0)
    call = chunk(shape, torch.float32, torch.device("cpu"))
    found = triton.chunk_attention(*call.args, **call.kwargs, cut=cut)
    assert error(found, reference.chunk_attention(*call.args, **call.kwargs)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("fp8", [False, True])
def test_an_fp8_cache_is_for_the_plain_kernel(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "capability", lambda _: (9, 0))
    call = chunk(ChunkShape(((70, 70),), 4, 2, 64, fp8=fp8), torch.bfloat16, torch.device("cpu"))
    assert hopper.takes(*call.args[:3]) != fp8


@pytest.mark.parametrize("build", BUILDS, ids=lambda b: "-".join(map(str, b.values())))
def test_compiles_into_products_that_overlap(build: dict[str, Any], tmp_path: Path) -> None:
    made = _compiled(build)
    ptx = made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024
    assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == 1
    (tmp_path / "kernel.ptx").write_text(ptx)
    from triton import knobs

    command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    assert "serialized" not in said
    assert int(re.findall(r"(\d+) bytes spill stores", said)[-1]) <= 512


def _compiled(build: dict[str, Any]) -> Any:
    from triton import compile as compile_kernel
    from triton import next_power_of_2
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel, build = hopper_kernel.hopper_kernel, build.copy()
    dtype, D = build.pop("dtype", "bf16"), build["D"]
    cut = hopper.config(D)
    constants = {"HKV": 8, "BLOCK_D": next_power_of_2(D), "BLOCK_S": cut.block_s, "STAGES": cut.stages, "PDL": True}
    constants |= {"WINDOW": False, "SOFTCAP": False, "SINKS": False} | build
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, "
    layout += "fp4_padded=False, cga_layout=[])"
    box = f"tensordesc<{dtype}[{min(cut.block_s, build['PAGE'])}, 64],{layout}>"
    types = {name: t.replace("bf16", dtype) for name, t in POINTERS.items()} | {"k_desc": box, "v_desc": box}
    types |= dict.fromkeys(FLOATS, "fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t[0] == "*"}
    options = {"num_warps": 4, "maxnreg": hopper.MAX_REGISTERS, "launch_pdl": True}
    source = GluonASTSource(kernel, signature, constants, aligned)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [c for c in (*all_cases(), *REAL) if c.op == "chunk_attention"], ids=str)
def test_matches_the_reference(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    call = case.make(dtype, torch.device("cuda", 0))
    if not hopper.takes(*call.args[:3]):
        pytest.skip("needs capability 9.0, and a shape that the kernel takes")
    with poisoned():
        (found,) = call.run(partial(triton.chunk_attention, cut=hopper.config(call.args[0].shape[2])))
    (oracle,) = call.run(reference.chunk_attention, lift=True)
    assert error(found, oracle) <= TOLERANCE[dtype]
