"""Batch-invariant products: which chunks and cuts are chosen; the kernels themselves in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuformers.kernels.invariant_linear.config import (
    CHUNK_STEP,
    GATED_TILES,
    SMALL_GATED_TILES,
    SMALL_TILES,
    TILES,
    Tile,
    chunk,
    config,
    cuts,
    splits,
)
from cuformers.kernels.op import Problem
from cuformers.kernels.table import OPS

ALL_GATED = (*SMALL_GATED_TILES, *GATED_TILES)
SHAPES = [
    (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096),
    (4096, 1024), (1024, 2048), (1024, 3072), (896, 4864), (7, 5), (64, 260),
]  # fmt: skip


@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_chunks_cover_the_columns_and_none_is_empty(N: int, K: int) -> None:
    count = splits(N, K)
    size = chunk(K, count)
    assert size % CHUNK_STEP == 0 and (count - 1) * size < K <= count * size


@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("gated", [False, True])
def test_every_size_gets_a_cut_that_can_serve_it(N: int, K: int, gated: bool) -> None:
    count = 1 if gated else splits(N, K)
    for T in (1, 2, 17, 64, 65, 256, 300, 4096):
        cut = config(N, K, T, count=count, gated=gated, num_sms=132)
        one_kernel = cut.tile in ALL_GATED if gated else count == 1 or cut.tile.holds_chunks
        assert cut.then == ("gate" if gated else "sum") or (cut.then == "done" and one_kernel)


def test_large_tiles_are_made_of_warpgroups() -> None:
    """Hopper's warpgroup product takes 64 rows and four warps."""
    assert all(tile.block_m < 64 for tile in (*SMALL_TILES, *SMALL_GATED_TILES))
    for tile in (*TILES, *GATED_TILES):
        assert tile.block_m % 64 == 0 and tile.num_warps % 4 == 0
    for tile in (*SMALL_TILES, *TILES, *ALL_GATED):
        assert all(size & (size - 1) == 0 for size in tile[:4])
    assert all(tile.block_n == tile.block_n2 for tile in ALL_GATED)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_small_tiles_can_be_left_out(count: int, gated: bool) -> None:
    kept, every = (cuts(count, gated=gated, small=small) for small in (False, True))
    assert set(kept) < set(every) and all(cut.tile.block_m >= 64 for cut in kept)


def test_few_rows_get_narrow_tiles_and_many_get_wide_ones() -> None:
    few, many = (config(24576, 4096, T, count=1, gated=False, num_sms=132).tile for T in (1, 8192))
    assert few.block_m < 64 and many.block_m * many.width >= 128 * 192


def test_training_uses_the_same_kernels() -> None:
    op = next(op for op in OPS if op.name == "invariant_linear")
    for mode in ("infer", "train"):
        choice = op.choose(Problem(device="cuda", capability=(9, 0), mode=mode))
        assert choice.implementation.name == "triton" and choice.function is choice.implementation.load()


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    here = Path(__file__).parent
    file = str(here / "interpreted_invariant.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, cwd=here.parent.parent, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


def compiled(tile: Tile, gated: bool) -> tuple[str, int]:
    """(PTX, bytes of shared memory) of a tile for Hopper."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cuformers.kernels.invariant_linear.kernel import product_kernel

    constants = {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_N2": tile.block_n2, "BLOCK_K": 64, "GROUP": 8,
        "SPLITS": 2 if tile.holds_chunks else 1, "PARTIAL": False, "BIAS": False, "RESIDUAL": not gated,
        "ACTIVATION": "silu" if gated else "none", "TMA": True, "UPCAST": False,
        "AHEAD": 512 if tile.block_m < 64 else 0, "PDL": True,
    }  # fmt: skip
    second = tile.block_n2 if tile.block_n2 > 1 else tile.block_n
    known = {f"{name}_ptr": "*bf16" for name in ("weight", "bias", "residual", "y")} | {"scale": "fp32"}
    for name, block in (("x", tile.block_m), ("w", tile.block_n), ("w2", second)):
        known[f"{name}_ptr"] = f"tensordesc<bf16[{block},64]>"
    signature = {n: "constexpr" if n in constants else known.get(n, "i32") for n in product_kernel.arg_names}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}
    source = ASTSource(product_kernel, signature, constants, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return made.asm["ptx"], made.metadata.shared


def name(tile: Tile) -> str:
    return "x".join(map(str, tile[:4]))


@pytest.mark.parametrize("tile", [*TILES, *GATED_TILES], ids=name)
def test_every_tile_fits_hopper_and_asks_for_warpgroup_products_only(tile: Tile) -> None:
    """Another family of instructions might round otherwise."""
    ptx, shared = compiled(tile, tile in GATED_TILES)
    assert shared * tile.per_sm <= 227 * 1024
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx and "fma.rn.f32" not in ptx


@pytest.mark.parametrize("tile", [*SMALL_TILES, *SMALL_GATED_TILES], ids=name)
def test_small_tiles_take_sixteen_columns_at_a_time_too_and_ask_for_weights_early(tile: Tile) -> None:
    """That this instruction adds in the order of the other one is tested on a GPU."""
    ptx, shared = compiled(tile, tile in SMALL_GATED_TILES)
    assert shared * tile.per_sm <= 227 * 1024
    assert "m16n8k16" in ptx and "wgmma" not in ptx and "m16n8k8" not in ptx and "fma.rn.f32" not in ptx
    before, after = ptx.split("griddepcontrol.wait")
    assert "prefetch.global.L2" in before and "prefetch.global.L2" not in after
