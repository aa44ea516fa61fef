"""The convolution in Triton: each program finds which sequences its tokens belong to, and reads K of each's inputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels.causal_conv1d import Convolved
from cuformers.kernels.causal_conv1d.reference import last_inputs

BLOCK_T, BLOCK_C = 32, 128


@triton.jit
def _sequence_of(bounds_ptr, token, N, STEPS: tl.constexpr):
    """The last of the N sequences that begins at the token or before it; 2 ** STEPS > N."""
    low = token * 0
    high = low + (N - 1)
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        begun = tl.load(bounds_ptr + middle) <= token
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    return low


@triton.jit
def conv_kernel(
    x_ptr, weight_ptr, bias_ptr, carried_ptr, bounds_ptr, y_ptr, T, C, N, x_stride,
    K: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BIAS: tl.constexpr, CARRIED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of T, blocks of C]. x [T, C] with rows x_stride apart, weight [C, K], carried [N, K - 1, C]."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    sequence = _sequence_of(bounds_ptr, token, N, STEPS)
    start = tl.load(bounds_ptr + sequence)
    real = (token < T)[:, None] & (channel < C)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(K):
        source = token + (k - (K - 1))
        own = source >= start
        at = source.to(tl.int64)[:, None] * x_stride + channel[None, :]
        x = tl.load(x_ptr + at, mask=real & own[:, None], other=0.0).to(tl.float32)
        if CARRIED:
            row = (sequence * (K - 1) + source - start + (K - 1)).to(tl.int64)
            before = tl.load(
                carried_ptr + row[:, None] * C + channel[None, :], mask=real & (source < start)[:, None], other=0.0
            )
            x += before.to(tl.float32)
        total += x * tl.load(weight_ptr + channel * K + k, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total *= tl.sigmoid(total)
    out = token.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(y_ptr + out, total.to(y_ptr.dtype.element_ty), mask=real)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    initial: Tensor | None = None,
    activation: str = "silu",
    keep: bool = False,
) -> Convolved:
    """See the package."""
    assert activation in ("silu", "none"), f"no activation {activation!r}"
    x = x.detach() if x.stride(-1) == 1 else x.detach().contiguous()
    initial = None if initial is None else initial.detach().contiguous()
    (T, C), K, N = x.shape, weight.shape[1], cu_seqlens.numel() - 1
    y = torch.empty(T, C, dtype=x.dtype, device=x.device)
    if T:
        conv_kernel[(triton.cdiv(T, BLOCK_T), triton.cdiv(C, BLOCK_C))](
            x, weight.detach().contiguous(), x if bias is None else bias.detach(), x if initial is None else initial,
            cu_seqlens, y, T, C, N, x.stride(0),
            K=K, STEPS=N.bit_length(), BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C,
            BIAS=bias is not None, CARRIED=initial is not None, SILU=activation == "silu", num_warps=4,
        )  # fmt: skip
    return Convolved(y, last_inputs(x, cu_seqlens, initial, K - 1) if keep else None)
