"""The first half of a gated feed-forward block: fused up to 16 rows, cuBLAS and one elementwise kernel above."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from cuformers.kernels.activation import activation_function
from cuformers.kernels.activation_triton import activate
from cuformers.kernels.launch import pdl
from cuformers.kernels.linear.skinny import skinny, takes
from cuformers.kernels.norm.triton import rms_norm
from cuformers.kernels.norm_args import Norm

BLOCK = 1024


@triton.jit
def _gate_kernel(x_ptr, y_ptr, I, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < I
    at = x_ptr + row * 2 * I + col
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + I, mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(y_ptr + row * I + col, y.to(y_ptr.dtype.element_ty), mask=inside)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """See the package."""
    activation_function(activation)  # refuses an unknown name
    gate_up = gate_up.detach().contiguous()
    I = gate_up.shape[-1] // 2
    y = torch.empty((*gate_up.shape[:-1], I), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        grid = (y.numel() // I, triton.cdiv(I, BLOCK))
        _gate_kernel[grid](gate_up, y, I, BLOCK=BLOCK, ACTIVATION=activation, num_warps=4, **pdl(y.device))
    return y


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, norm: Norm | None = None
) -> Tensor:
    """See the package."""
    activation_function(activation)  # refuses an unknown name
    if takes(x, weight):
        return skinny(x, weight, bias, norm=norm, activation=activation)
    if norm is not None:
        x = rms_norm(x, *norm)
    return gated_activation(F.linear(x, weight, bias), activation)
