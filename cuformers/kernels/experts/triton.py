"""The experts' product: weight rows streamed for few tokens, sorted tiles on tensor cores for more."""

from collections.abc import Callable

import torch
from torch import Tensor

from cuformers.kernels.activation import CLAMPED_SWIGLU, activation_function
from cuformers.kernels.experts import Biases, few, reference
from cuformers.kernels.experts.config import FEW_TOKENS, rows_of_tile
from cuformers.kernels.experts.gradient import Mixture
from cuformers.kernels.experts.grouped import combine, grouped
from cuformers.kernels.experts.order import sort_pairs


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str,
    *,
    residual: Tensor | None = None,
    scale: float = 1.0,
    biases: Biases | None = None,
    interleaved: bool = False,
    gate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """See the package. With a `gate` of the caller's, gradients are the reference's."""
    if activation != CLAMPED_SWIGLU:
        activation_function(activation)  # refuses an unknown name
    assert gate is None or not interleaved, "a gate of the caller's takes gate before up"
    assert x.dtype == gate_up.dtype == down.dtype, "x and the experts share one dtype"
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32, "weights are float32, ids are int32"
    if not len(x):
        return x if residual is None else x + residual
    x, gate_up, down, weights, ids = (t.contiguous() for t in (x, gate_up, down, weights, ids))
    biases = biases and Biases(*(b.contiguous() for b in biases))
    floats = (x, gate_up, down, weights)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*floats, *(biases or ()), residual)):
        if gate is not None:
            options = {"scale": scale, "biases": biases, "interleaved": interleaved, "gate": gate}
            return reference.experts(*floats, ids, activation, residual=residual, **options)
        y: Tensor = Mixture.apply(*floats, *(biases or (None, None)), ids, activation, interleaved)  # type: ignore
        y = y if scale == 1.0 else y * scale
        return y if residual is None else y + residual
    x, gate_up, down, weights = (t.detach() for t in floats)
    residual = None if residual is None else residual.detach().contiguous()
    if len(x) <= FEW_TOKENS and gate is None and biases is None and not interleaved:
        h = few.up(x, gate_up, ids, activation)
        return few.down(h, down, weights, ids, residual, scale)
    block_m = rows_of_tile(ids.numel(), len(down), x.dtype)
    options = {"biases": biases, "interleaved": interleaved, "gate": gate}
    return sorted_experts(x, gate_up, down, weights, ids, activation, residual, scale, block_m, **options)


def sorted_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str,
    residual: Tensor | None,
    scale: float,
    block_m: int,
    *,
    biases: Biases | None = None,
    interleaved: bool = False,
    gate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The same by tiles of block_m rows, without gradients; all operands are contiguous, and there is a token."""
    order, top_k = sort_pairs(ids, len(down), block_m), ids.shape[1]
    first, second = (None, None) if biases is None else (b.detach() for b in biases)
    way = {"top_k": top_k, "transposed": interleaved, "bias": first}
    if gate is None:
        h = grouped(x, gate_up, order, block_m, activation=activation, interleaved=interleaved, **way)
    else:
        h = gate(grouped(x, gate_up, order, block_m, **way)).contiguous()
    y = grouped(h, down, order, block_m, transposed=interleaved, bias=second)
    return combine(y, order, top_k, weights, residual, scale)
