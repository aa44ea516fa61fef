"""RMS norm in Triton: one program per row, the whole row in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels.launch import pdl


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, eps, offset,
    H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ADD is "none", "before" (y = norm(x + residual), sum is stored too) or "after" (y = residual + norm(x))."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    col = tl.arange(0, BLOCK)
    inside = col < H
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * H + col
    if PDL:
        tl.extra.cuda.gdc_wait()
    raw = tl.load(x_ptr + at, mask=inside, other=0.0)
    if ADD != "none":
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
    if ADD == "before":
        raw = (raw.to(tl.float32) + residual.to(tl.float32)).to(raw.dtype)
        tl.store(sum_ptr + at, raw, mask=inside)
    x = raw.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / H + eps) * (offset + weight)
    if ADD == "after":
        y = y.to(raw.dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(y_ptr + at, y.to(raw.dtype), mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, add: str) -> list[Tensor]:
    """Outputs: the norm, and the sum where the addition comes before."""
    x = x.detach().contiguous()
    residual = x if residual is None else residual.detach().contiguous()
    assert residual.shape == x.shape and residual.dtype == x.dtype, "x and residual share shape and dtype"
    H = x.shape[-1]
    y = torch.empty_like(x)
    total = torch.empty_like(x) if add == "before" else y
    block = triton.next_power_of_2(H)
    if x.numel():
        _norm_kernel[(x.numel() // H,)](
            x, residual, weight.detach(), y, total, float(eps), float(offset),
            H=H, BLOCK=block, ADD=add, num_warps=min(16, max(1, block // 512)), **pdl(x.device),
        )  # fmt: skip
    return [y, total]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See the package."""
    return _launch(x, None, weight, eps, offset, "none")[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """See the package."""
    y, total = _launch(x, residual, weight, eps, offset, "before")
    return y, total


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See the package."""
    return _launch(x, residual, weight, eps, offset, "after")[0]
