"""The launch for capability 9.0, whose tensor cores take a warpgroup's products straight from shared memory."""

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cuformers.cuda.device import capability
from cuformers.kernels.chunk_attention.hopper_kernel import hopper_kernel
from cuformers.kernels.chunk_attention.hopper_load_kernel import COLUMNS
from cuformers.kernels.launch import interpreted, pdl, sms
from cuformers.kernels.op import HALF

MAX_REGISTERS = 168
"""A thread's share where a program has 12 warps; the computing ones then get more, at the loader's expense."""
TILE_ROWS = 128


class HopperConfig(NamedTuple):
    """How chunk attention is cut on capability 9.0."""

    block_s: int
    """Keys per tile."""
    stages: int
    """Tiles of keys, and of values, in shared memory."""


def config(head_dim: int) -> HopperConfig:
    """The largest tiles that fit 227 KiB of shared memory twice.

    Example:
        >>> config(128)
        HopperConfig(block_s=128, stages=2)
    """
    return HopperConfig(128 if head_dim <= 128 else 64, 2)


def takes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether device, dtype and shapes are ones that the kernel is made for."""
    if q.dtype not in HALF or k_cache.dtype != q.dtype or capability(q.device) != (9, 0) or interpreted():
        return False
    HKV, _, D = k_cache.shape[1:]
    rows_of_d = k_cache.stride(0) % D == 0 and v_cache.stride(0) % D == 0
    return 64 <= D <= 256 and D % 8 == 0 and rows_of_d and q.shape[1] // HKV <= TILE_ROWS


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    sinks: Tensor,
    out: Tensor,
    numbers: tuple[float, float, int],
    flags: dict[str, bool],
    cut: HopperConfig,
) -> None:
    """Fills `out`. `tables`: block tables, bounds, rows, lengths; `numbers`: scale, softcap, window."""
    T, num_heads, D = q.shape
    HKV, PAGE = k_cache.shape[1:3]
    N, G = tables[2].shape[0], num_heads // HKV
    items = (T // (TILE_ROWS // G) + N + 1) * HKV
    part = min(cut.block_s, PAGE)
    options: dict[str, Any] = {
        "HKV": HKV, "G": G, "D": D, "BLOCK_D": triton.next_power_of_2(D), "PAGE": PAGE, "BLOCK_S": cut.block_s,
        "STAGES": cut.stages, "num_warps": 4, "maxnreg": MAX_REGISTERS, **flags, **pdl(q.device),
    }  # fmt: skip
    hopper_kernel[(min(items, sms(q.device)),)](
        q, _rows(k_cache, part), _rows(v_cache, part), *tables, sinks, out,
        T, N, q.stride(0), tables[0].stride(0), k_cache.stride(0) // D, v_cache.stride(0) // D, *numbers,
        **options,
    )  # fmt: skip


def _rows(cache: Tensor, part: int) -> TensorDescriptor:
    """The pool as rows of D, from which boxes of `part` rows are loaded."""
    P, HKV, PAGE, D = cache.shape
    shape = [(P - 1) * (cache.stride(0) // D) + HKV * PAGE, D]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(cache, shape, [D, 1], [part, COLUMNS.value], layout)
