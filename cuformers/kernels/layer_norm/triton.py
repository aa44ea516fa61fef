"""Layer norm in Triton: some rows at once, whole and in registers, and then the next ones with the same weights."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels.launch import pdl, sms

TILE = 4096
"""Elements at once, where a row has fewer: 16 a thread, as two loads of 16 bytes of a 16-bit dtype."""


@triton.jit
def _layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, eps, T,
    H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = norm(x), of x + residual where ADD, stored too where KEEP; a program has ROWS of the T rows, TURNS times."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < H
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    row = tl.program_id(0) * (ROWS * TURNS) + tl.arange(0, ROWS)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    for _ in tl.static_range(TURNS):
        seen = inside & (row < T)
        at = row.to(tl.int64) * H + col
        raw = tl.load(x_ptr + at, mask=seen, other=0.0)
        if ADD:
            residual = tl.load(residual_ptr + at, mask=seen, other=0.0)
            raw = (raw.to(tl.float32) + residual.to(tl.float32)).to(raw.dtype)
        if KEEP:
            tl.store(sum_ptr + at, raw, mask=seen)
        x = raw.to(tl.float32)
        x = tl.where(inside, x - tl.sum(x, axis=1, keep_dims=True) / H, 0.0)  # a second pass: no cancellation
        y = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / H + eps) * weight
        if BIAS:
            y += bias
        tl.store(y_ptr + at, y.to(raw.dtype), mask=seen)
        row += ROWS


class LayerNormConfig(NamedTuple):
    """How rows are given to programs; it changes no result."""

    rows: int
    """At once."""
    turns: int
    """How often a program takes so many."""
    num_warps: int


def config(rows: int, block: int, num_sms: int) -> LayerNormConfig:
    """For `rows` rows of up to `block` elements: programs keep their weights where there is work for several turns."""
    at_once = max(1, TILE // block)
    turns = 4 if rows >= 16 * at_once * num_sms else 1
    return LayerNormConfig(at_once, turns, min(16, max(1, at_once * block // 512)))


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
    block, rows = triton.next_power_of_2(H), x.numel() // max(1, H)
    if rows:
        at_once, turns, num_warps = config(rows, block, sms(x.device))
        # A pointer that is not used is any tensor.
        _layer_norm_kernel[(triton.cdiv(rows, at_once * turns),)](
            x, x if residual is None else residual, weight.detach(), (weight if bias is None else bias).detach(),
            y, total, float(eps), rows,
            H=H, BLOCK=block, ROWS=at_once, TURNS=turns, BIAS=bias is not None, ADD=residual is not None, KEEP=keep,
            num_warps=num_warps, **pdl(x.device),
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
