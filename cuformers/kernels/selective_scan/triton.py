"""Mamba's recurrence in Triton: a warp walks through a sequence with the states of some channels in its registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels.selective_scan import Scanned

BLOCK_C = 32
"""Channels of a program: one for each lane, so that the sum over a channel's state stays within one."""
AT_ONCE = 4
"""Tokens whose inputs are asked for before the first of them is used: no state depends on when they arrive."""
LOG2E = 1.4426950408889634


@triton.jit
def softplus(x):
    """log(1 + exp(x)), which from 20 on is x."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def selective_scan_kernel(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, z_ptr, dt_bias_ptr, state_ptr, bounds_ptr, y_ptr, final_ptr,
    C, x_stride, dt_stride, b_stride, c_stride, z_stride,
    S: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, AT_ONCE: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Grid [sequences, blocks of C]. rate is A * log2(e) [C, S]; the states are [S, C] here, [N, C, S] in memory."""
    sequence, channel = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(bounds_ptr + sequence).to(tl.int64)
    end = tl.load(bounds_ptr + sequence + 1).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    inside, used = channel < C, s < S
    both = used[:, None] & inside[None, :]
    rate = tl.load(rate_ptr + channel[None, :] * S + s[:, None], mask=both, other=0.0)
    places = (sequence.to(tl.int64) * C + channel[None, :]) * S + s[:, None]
    h = tl.zeros((BLOCK_S, BLOCK_C), dtype=tl.float32)
    if STATE:
        h += tl.load(state_ptr + places, mask=both, other=0.0)
    skip = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if SKIP:
        skip += tl.load(skip_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    dt_bias = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if BIAS:
        dt_bias += tl.load(dt_bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for first in range(start, end, AT_ONCE):
        dts, xs, bs, cs, zs = (), (), (), (), ()
        for j in tl.static_range(AT_ONCE):
            t = first + j
            real = t < end
            dts = dts + (tl.load(dt_ptr + t * dt_stride + channel, mask=inside & real, other=0.0),)  # noqa: RUF005
            xs = xs + (tl.load(x_ptr + t * x_stride + channel, mask=inside & real, other=0.0),)  # noqa: RUF005
            bs = bs + (tl.load(b_ptr + t * b_stride + s, mask=used & real, other=0.0),)  # noqa: RUF005
            cs = cs + (tl.load(c_ptr + t * c_stride + s, mask=used & real, other=0.0),)  # noqa: RUF005
            if GATE:
                zs = zs + (tl.load(z_ptr + t * z_stride + channel, mask=inside & real, other=0.0),)  # noqa: RUF005
        for j in tl.static_range(AT_ONCE):
            real = first + j < end
            step = tl.where(real, softplus(dts[j].to(tl.float32) + dt_bias), 0.0)
            x = xs[j].to(tl.float32)
            h = tl.exp2(step[None, :] * rate) * h + (step * x)[None, :] * bs[j].to(tl.float32)[:, None]
            y = tl.sum(h * cs[j].to(tl.float32)[:, None], 0) + skip * x
            if GATE:
                z = zs[j].to(tl.float32)
                y *= z * tl.sigmoid(z)
            at = (first + j) * C + channel
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside & real)
    if KEEP:
        tl.store(final_ptr + places, h, mask=both)


def rows_of(x: Tensor) -> Tensor:
    """The tensor without its gradient, its rows wherever they are, and within a row nothing in between."""
    x = x.detach()
    return x if x[0:1].is_contiguous() else x.contiguous()


def selective_scan(
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
    initial: Tensor | None = None,
    keep: bool = False,
) -> Scanned:
    """See the package."""
    x, dt, B, C = (rows_of(v) for v in (x, dt, B, C))
    gate = x if z is None else rows_of(z)
    channels, S, N = *A.shape, cu_seqlens.numel() - 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(N, channels, S, device=x.device) if keep else y
    if N:
        selective_scan_kernel[(N, triton.cdiv(channels, BLOCK_C))](
            x, dt, (A.detach() * LOG2E).contiguous(), B, C, x if D is None else D.detach(), gate,
            x if dt_bias is None else dt_bias.detach(), final if initial is None else initial.detach().contiguous(),
            cu_seqlens, y, final,
            channels, x.stride(0), dt.stride(0), B.stride(0), C.stride(0), gate.stride(0),
            S=S, BLOCK_S=triton.next_power_of_2(S), BLOCK_C=BLOCK_C, AT_ONCE=AT_ONCE,
            SKIP=D is not None, GATE=z is not None, BIAS=dt_bias is not None, STATE=initial is not None, KEEP=keep,
            num_warps=1,
        )  # fmt: skip
    return Scanned(y, final if keep else None)
