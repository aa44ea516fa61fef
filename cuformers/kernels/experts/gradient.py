"""The experts' product with gradients: every product of the backward pass is a grouped one too."""

from typing import Any

import torch
from torch import Tensor

from cuformers.kernels.experts.config import rows_of_tile
from cuformers.kernels.experts.gradient_kernel import gate_gradient_kernel
from cuformers.kernels.experts.grouped import combine, grouped, weight_gradient
from cuformers.kernels.experts.order import Order, sort_pairs
from cuformers.kernels.gated_linear.triton import gated_activation

BLOCK = 1024
"""Columns per step of `gate_gradient_kernel`."""


class Mixture(torch.autograd.Function):
    """(x, gate_up, down, weights, ids, activation) -> y: see the package. Of what it computes it keeps gate and up."""

    @staticmethod
    def forward(
        ctx, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, activation: str
    ) -> Tensor:
        top_k, block_m = ids.shape[1], rows_of_tile(ids.numel(), len(down), x.dtype)
        order = sort_pairs(ids, len(down), block_m)
        opened = grouped(x, gate_up, order, block_m, top_k=top_k)
        y = grouped(gated_activation(opened, activation), down, order, block_m)
        ctx.save_for_backward(x, gate_up, down, weights, opened, *order)
        ctx.block_m, ctx.activation = block_m, activation
        return combine(y, order, top_k, weights)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, weights, opened, *tables = ctx.saved_tensors
        need_x, need_gate_up, need_down, need_weights, *_ = ctx.needs_input_grad
        order, top_k, grad = Order(*tables), weights.shape[1], grads[0].contiguous()
        inner = grouped(grad, down, order, ctx.block_m, top_k=top_k, transposed=True)
        opened_grad, weighted, weight_grad = _through_gate(opened, inner, order, weights, ctx.activation)
        x_grad = None
        if need_x:
            rows = grouped(opened_grad, gate_up, order, ctx.block_m, transposed=True)
            x_grad = combine(rows, order, top_k, None)
        return (
            x_grad,
            weight_gradient(opened_grad, x, order, top_k_b=top_k) if need_gate_up else None,
            weight_gradient(grad, weighted, order, top_k_a=top_k) if need_down else None,
            weight_grad if need_weights else None,
            None,
            None,
        )


def _through_gate(
    opened: Tensor, grad: Tensor, order: Order, weights: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate and up [P, 2I], weighted act(gate) * up [P, I], gradient of the weights [T, k])."""
    P, I = grad.shape
    opened_grad, weighted, weight_grad = torch.empty_like(opened), torch.empty_like(grad), torch.empty_like(weights)
    constants: dict[str, Any] = {"BLOCK": BLOCK, "ACTIVATION": activation}
    results = (opened_grad, weighted, weight_grad)
    gate_gradient_kernel[(P,)](opened, grad, order.order, weights, *results, I, **constants)
    return results
