"""Mamba-2's recurrence in Triton: chunk after chunk on the tensor cores, a head's state in one program's registers."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuformers.cuda.device import capability
from cuformers.kernels.launch import interpreted
from cuformers.kernels.selective_scan import Scanned
from cuformers.kernels.selective_scan.triton import rows_of, softplus


class ScanConfig(NamedTuple):
    """How a scan is cut."""

    chunk: int
    """Tokens that are computed as one: products within a chunk grow with its square, the state's share shrinks."""
    block_p: int
    """Columns of a head's state in one program; the heads' B and C are read once for each block of them."""
    num_warps: int = 8
    stages: int = 1
    """Chunks that are on their way at once."""


def config(dtype: torch.dtype, P: int, device: torch.device) -> ScanConfig:
    """Sizes at which the compiler spills least with a state of 128: nothing on 8.0, tens of bytes on 9.0."""
    if dtype == torch.float32:
        return ScanConfig(16, min(32, _padded(P)))
    wide = (9, 0) <= (capability(device) or (9, 0)) < (12, 0)  # products of 64 rows are one instruction there
    return ScanConfig(64 if wide else 32, min(64, _padded(P)))


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))



@triton.jit
def _product(a, b, UPCAST: tl.constexpr):
    """a b in float32; the interpreter's products of bfloat16 are wrong, so there operands go up first."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def ssd_scan_kernel(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, z_ptr, dt_bias_ptr, state_ptr, bounds_ptr, y_ptr, final_ptr,
    x_stride, dt_stride, b_stride, c_stride, z_stride, low, high,
    H: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Grid [heads, blocks of P, sequences]. SHARED heads have the same B and C.

    In a chunk whose decays add up to a[t], token t gets from token u <= t the share exp(a[t] - a[u]) * (C[t] . B[u]),
    and from the state before the chunk exp(a[t]) * C[t]; no exponent is above 0.
    """
    head, sequence = tl.program_id(0), tl.program_id(2)
    start, end = tl.load(bounds_ptr + sequence).to(tl.int64), tl.load(bounds_ptr + sequence + 1).to(tl.int64)
    i, s = tl.arange(0, CHUNK), tl.arange(0, BLOCK_S)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    rate = tl.load(rate_ptr + head)
    kind = y_ptr.dtype.element_ty
    at = (sequence * H + head).to(tl.int64) * P * S
    places = p[None, :] * S + s[:, None]
    both = (s < S)[:, None] & (p < P)[None, :]
    h = tl.zeros((BLOCK_S, BLOCK_P), dtype=tl.float32)
    if STATE:
        h += tl.load(state_ptr + at + places, mask=both, other=0.0)
    heads = head * P + p[None, :]
    groups = head // SHARED * S + s[None, :]
    for first in tl.range(start, end, CHUNK, num_stages=STAGES):
        real = i < end - first
        x_mask, b_mask = real[:, None] & (p < P)[None, :], real[:, None] & (s < S)[None, :]
        x = tl.load(x_ptr + first * x_stride + (i[:, None] * x_stride + heads), mask=x_mask, other=0.0)
        b = tl.load(b_ptr + first * b_stride + (i[:, None] * b_stride + groups), mask=b_mask, other=0.0)
        c = tl.load(c_ptr + first * c_stride + (i[:, None] * c_stride + groups), mask=b_mask, other=0.0)
        dt = tl.load(dt_ptr + first * dt_stride + (i * dt_stride + head), mask=real, other=0.0).to(tl.float32)
        if BIAS:
            dt += tl.load(dt_bias_ptr + head).to(tl.float32)
        dt = tl.where(real, tl.minimum(tl.maximum(softplus(dt), low), high), 0.0)
        a = tl.cumsum(dt * rate, 0)
        whole = tl.sum(dt * rate, 0)
        seen = i[:, None] >= i[None, :]
        shares = tl.exp(tl.where(seen, a[:, None] - a[None, :], float("-inf"))) * dt[None, :]
        scores = (_product(c, tl.trans(b), UPCAST) * shares).to(kind)
        y = _product(scores, x, UPCAST) + tl.exp(a)[:, None] * _product(c, h.to(kind), UPCAST)
        left = tl.exp(tl.minimum(whole - a, 0.0)) * dt
        h = tl.exp(whole) * h + _product(tl.trans((b.to(tl.float32) * left[:, None]).to(kind)), x, UPCAST)
        if SKIP:
            y += tl.load(skip_ptr + head).to(tl.float32) * x.to(tl.float32)
        if GATE:
            z = tl.load(z_ptr + first * z_stride + (i[:, None] * z_stride + heads), mask=x_mask, other=0.0)
            y *= z.to(tl.float32) * tl.sigmoid(z.to(tl.float32))
        tl.store(y_ptr + first * (H * P) + (i[:, None] * (H * P) + heads), y.to(kind), mask=x_mask)
    if KEEP:
        tl.store(final_ptr + at + places, h, mask=both)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    cu_seqlens: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial: Tensor | None = None,
    keep: bool = False,
) -> Scanned:
    """See the package."""
    x, dt, B, C = (rows_of(v) for v in (x, dt, B, C))
    gate = x if z is None else rows_of(z)
    (_, H, P), (_, G, S), N = x.shape, B.shape, cu_seqlens.numel() - 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(N, H, P, S, device=x.device) if keep else y
    cut = config(x.dtype, P, x.device)
    if N:
        ssd_scan_kernel[(H, triton.cdiv(P, cut.block_p), N)](
            x, dt, A.detach(), B, C, x if D is None else D.detach(), gate,
            x if dt_bias is None else dt_bias.detach(), final if initial is None else initial.detach().contiguous(),
            cu_seqlens, y, final,
            x.stride(0), dt.stride(0), B.stride(0), C.stride(0), gate.stride(0), float(dt_limit[0]), float(dt_limit[1]),
            H=H, SHARED=H // G, P=P, S=S,
            CHUNK=cut.chunk, BLOCK_P=cut.block_p, BLOCK_S=_padded(S), STAGES=cut.stages, UPCAST=interpreted(),
            SKIP=D is not None, GATE=z is not None, BIAS=dt_bias is not None, STATE=initial is not None, KEEP=keep,
            num_warps=cut.num_warps,
        )  # fmt: skip
    return Scanned(y, final if keep else None)
