"""Layer norm in Triton: one program per row, the whole row in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels.launch import pdl


@triton.jit
def _layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y = norm(x), of x + residual where ADD, which is stored too where KEEP."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    col = tl.arange(0, BLOCK)
    inside = col < H
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * H + col
    if PDL:
        tl.extra.cuda.gdc_wait()
    raw = tl.load(x_ptr + at, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        raw = (raw.to(tl.float32) + residual.to(tl.float32)).to(raw.dtype)
    if KEEP:
        tl.store(sum_ptr + at, raw, mask=inside)
    x = raw.to(tl.float32)
    x = tl.where(inside, x - tl.sum(x) / H, 0.0)  # two passes over registers: no cancellation
    y = x * tl.rsqrt(tl.sum(x * x) / H + eps) * weight
    if BIAS:
        y += bias
    tl.store(y_ptr + at, y.to(raw.dtype), mask=inside)


def num_warps(block: int) -> int:
    """16 elements a thread, as two or four loads of 16 bytes, while a program has room for that."""
    return min(16, max(1, block // 512))


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """The norm, and the sum where it is kept."""
    x = x.detach().contiguous()
    residual = residual if residual is None else residual.detach().contiguous()
    if residual is not None:
        assert residual.shape == x.shape and residual.dtype == x.dtype, "x and residual share shape and dtype"
    H = x.shape[-1]
    y = torch.empty_like(x)
    total = torch.empty_like(x) if keep else y
    block = triton.next_power_of_2(H)
    if x.numel():
        # A pointer that is not used is any tensor.
        _layer_norm_kernel[(x.numel() // H,)](
            x, x if residual is None else residual, weight.detach(), (weight if bias is None else bias).detach(),
            y, total, float(eps),
            H=H, BLOCK=block, BIAS=bias is not None, ADD=residual is not None, KEEP=keep,
            num_warps=num_warps(block), **pdl(x.device),
        )  # fmt: skip
    return y, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """See the package."""
    return _launch(x, residual, weight, bias, eps, keep=False)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See the package."""
    return _launch(x, residual, weight, bias, eps, keep=True)
