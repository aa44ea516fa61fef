"""The experts' product with gradients: every product of the backward pass is a grouped one too."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from cuformers.kernels.experts.config import rows_of_tile
from cuformers.kernels.experts.gradient_kernel import gate_gradient_kernel, gate_kernel
from cuformers.kernels.experts.grouped import combine, grouped, row_sums, weight_gradient
from cuformers.kernels.experts.order import Order, sort_pairs

BLOCK = 1024
"""Columns per step of the kernels around the activation."""


class Mixture(torch.autograd.Function):
    """(x, gate_up, down, weights, gate_up's bias | None, down's | None, ids, activation, interleaved) -> y.

    See the package. Of what it computes it keeps gate and up.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor,
        first_bias: Tensor | None,
        second_bias: Tensor | None,
        ids: Tensor,
        activation: str,
        interleaved: bool,
    ) -> Tensor:
        top_k, block_m = ids.shape[1], rows_of_tile(ids.numel(), len(down), x.dtype)
        order = sort_pairs(ids, len(down), block_m)
        opened = grouped(x, gate_up, order, block_m, top_k=top_k, transposed=interleaved, bias=first_bias)
        h = _through_gate(opened, activation, interleaved)
        y = grouped(h, down, order, block_m, transposed=interleaved, bias=second_bias)
        ctx.save_for_backward(x, gate_up, down, weights, second_bias, ids, opened, *order)
        ctx.block_m, ctx.activation, ctx.interleaved = block_m, activation, interleaved
        return combine(y, order, top_k, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, weights, second_bias, ids, opened, *tables = ctx.saved_tensors
        need_x, need_gate_up, need_down, need_weights, need_first, need_second, *_ = ctx.needs_input_grad
        order, k, swapped, grad = Order(*tables), weights.shape[1], ctx.interleaved, grads[0].contiguous()
        inner = grouped(grad, down, order, ctx.block_m, top_k=k, transposed=not swapped)
        opened_grad, weighted, weight_grad = _back_through_gate(
            opened, inner, order, weights, ctx.activation, ctx.interleaved
        )
        x_grad = gate_up_grad = down_grad = None
        if need_x:
            rows = grouped(opened_grad, gate_up, order, ctx.block_m, transposed=not swapped)
            x_grad = combine(rows, order, k, None)
        if need_gate_up:
            gate_up_grad = _outer((opened_grad, 0), (x, k), order, swapped)
        if need_down:
            down_grad = _outer((grad, k), (weighted, 0), order, swapped)
        if need_weights and second_bias is not None:
            weight_grad = weight_grad + (grad @ second_bias.t()).float().gather(1, ids.long())
        first_grad = row_sums(opened_grad, order) if need_first else None
        second_grad = row_sums(grad, order, top_k=k, weights=weights) if need_second else None
        return x_grad, gate_up_grad, down_grad, weight_grad, first_grad, second_grad, None, None, None


def _outer(outputs: tuple[Tensor, int], inputs: tuple[Tensor, int], order: Order, swapped: bool) -> Tensor:
    """A weight's gradient [E, outputs, inputs], or with both swapped; each comes with its top_k."""
    (a, k_a), (b, k_b) = (inputs, outputs) if swapped else (outputs, inputs)
    return weight_gradient(a, b, order, top_k_a=k_a, top_k_b=k_b)


def _through_gate(opened: Tensor, activation: str, interleaved: bool) -> Tensor:
    """act(gate) * up: [P, 2I] -> [P, I]."""
    P, I = opened.shape[0], opened.shape[1] // 2
    h = torch.empty(P, I, dtype=opened.dtype, device=opened.device)
    flags: dict[str, Any] = {"BLOCK": BLOCK, "ACTIVATION": activation, "INTERLEAVED": interleaved}
    gate_kernel[P, triton.cdiv(I, BLOCK)](opened, h, I, **flags)
    return h


def _back_through_gate(
    opened: Tensor, grad: Tensor, order: Order, weights: Tensor, activation: str, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate and up [P, 2I], weighted act(gate) * up [P, I], gradient of the weights [T, k])."""
    results = torch.empty_like(opened), torch.empty_like(grad), torch.empty_like(weights)
    flags: dict[str, Any] = {"BLOCK": BLOCK, "ACTIVATION": activation, "INTERLEAVED": interleaved}
    gate_gradient_kernel[(len(grad),)](opened, grad, order.order, weights, *results, grad.shape[1], **flags)
    return results
