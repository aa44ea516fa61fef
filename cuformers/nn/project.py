"""Linear maps as the decoder needs them: several leaves as one product, a norm before, a residual after.

The leaves keep the checkpoint's names (q_proj, gate_proj, ...). Where they are plain `nn.Linear`s that lie one after
the other in one storage, they are used as one weight; what is added to some of them (an adapter) is added to the slice
of the product that is theirs. Where one of them was replaced by anything else (a quantized layer), has a hook, or asks
for gradients, each is called by itself. Nothing is ever stale: the fused weight is a view that is looked up at every
call.

Deterministic kernels always take the leaves as one weight, whose shape decides the bits: gradients are cut up for the
leaves, and leaves that can't be used as one are refused.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cuformers.base.log import notice
from cuformers.kernels.table import Kernels
from cuformers.nn.added import AddedLinear
from cuformers.nn.norm import RMSNorm


def is_plain(leaf: nn.Module) -> bool:
    """Whether a module is an nn.Linear that nobody has hooked, patched or replaced, so that its weight is all of it."""
    return has_plain_map(leaf) and not _adds(leaf)


def has_plain_map(leaf: nn.Module) -> bool:
    """Whether a module is such an nn.Linear, or one with something added to it."""
    hooks = (leaf._forward_hooks, leaf._forward_pre_hooks, leaf._backward_hooks, leaf._backward_pre_hooks)
    kind = type(leaf) is nn.Linear or isinstance(leaf, AddedLinear)
    return kind and not any(hooks) and "forward" not in vars(leaf)


def _adds(leaf: nn.Module) -> bool:
    return isinstance(leaf, AddedLinear) and bool(leaf.adding)


def rows_as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """The parts, stacked along dim 0, as a view of their common storage; None where they do not lie in a row."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if torch.is_grad_enabled() and any(p.requires_grad for p in parts):
        return None
    return _view(parts) if _lie_in_a_row(parts) else None


def _lie_in_a_row(parts: Sequence[Tensor]) -> bool:
    first = parts[0]
    end, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for part in parts:
        here = part.untyped_storage().data_ptr() == storage and part.storage_offset() == end
        if not (here and part.is_contiguous() and part.dtype == first.dtype):
            return False
        end += part.numel()
    return True


def _view(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    return first.detach().as_strided((sum(p.shape[0] for p in parts), *first.shape[1:]), first.stride())


class _View(torch.autograd.Function):
    """Parts that lie in a row as one tensor, whose gradient is cut up for them."""

    @staticmethod
    def forward(ctx, *parts: Tensor) -> Tensor:
        ctx.sizes = [p.shape[0] for p in parts]
        return _view(parts)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0].split(ctx.sizes)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one tensor, with gradients; a copy where they do not lie in a row."""
    if len(parts) == 1:
        return parts[0]
    if _lie_in_a_row(parts):
        return _View.apply(*parts)  # type: ignore[return-value]
    notice("weights used as one lie apart and are copied at every use: model.settle() lays them in a row.", once=True)
    return torch.cat(list(parts))


def fused(leaves: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | None:
    """Weight [sum N, K] and bias [sum N] of plain leaves as one linear map; None where they can't be had as views."""
    return _as_one(leaves) if all(is_plain(leaf) for leaf in leaves) else None


def _as_one(leaves: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | None:
    """The same, without what is added to the leaves."""
    if not all(has_plain_map(leaf) for leaf in leaves):
        return None
    linears: list[nn.Linear] = list(leaves)  # type: ignore[arg-type]
    weight = rows_as_one([leaf.weight for leaf in linears])
    biases = [leaf.bias for leaf in linears if leaf.bias is not None]
    if weight is None or len(biases) not in (0, len(linears)):
        return None
    bias = rows_as_one(biases) if biases else None
    return None if biases and bias is None else (weight, bias)


def one_map(ops: Kernels, leaves: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | None:
    """Weight [sum N, K] and bias [sum N] to give to a product of `ops`; None where each leaf must be called by itself.

    Raises:
        ValueError: the kernels are deterministic, and the leaves are more than their weights.
    """
    if not ops.deterministic:
        return fused(leaves)
    for leaf in leaves:
        if not is_plain(leaf):
            raise ValueError(
                f"a deterministic model can't use a layer that was replaced, patched or hooked ({leaf}): its product "
                "would depend on the batch. Undo that (merge an adapter), or call model.set_deterministic(False)."
            )
    linears: list[nn.Linear] = list(leaves)  # type: ignore[arg-type]
    weight = _joined([leaf.weight for leaf in linears])
    biases = [leaf.bias for leaf in linears]
    given = [b for b in biases if b is not None]
    if len(given) in (0, len(biases)):
        return weight, _joined(given) if given else None
    zeros = weight.new_zeros(weight.shape[0])
    return weight, torch.cat([zeros[: leaf.out_features] if leaf.bias is None else leaf.bias for leaf in linears])


def project(
    ops: Kernels,
    x: Tensor,
    leaves: Sequence[nn.Module],
    *,
    norm: RMSNorm | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    overwrite: bool = False,
) -> Tensor:
    """residual + scale * concat(leaf(norm(x)) for each leaf): [T, K] -> [T, sum N].

    With `overwrite` the residual is nobody else's: its memory may become the result's.
    """
    one = one_map(ops, leaves)
    if one is not None:
        weight, bias = one
        args = norm.args if norm is not None else None
        return ops.linear(x, weight, bias, norm=args, residual=residual, scale=scale, overwrite=overwrite)
    if norm is not None:
        x = norm(x)
    one = _as_one(leaves)
    if one is not None:
        y = ops.linear(x, *one, residual=residual, scale=scale, overwrite=overwrite)
        return _with_added(y, x, leaves, scale)  # type: ignore[arg-type]
    outputs = [leaf(x) for leaf in leaves]
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    y = y if scale == 1.0 else y * scale
    return y if residual is None else residual + y


def _with_added(y: Tensor, x: Tensor, leaves: Sequence[nn.Linear], scale: float) -> Tensor:
    """y [T, sum N], to be used no more, plus scale * what is added to each leaf."""
    if not torch.is_grad_enabled():
        start = 0
        for leaf in leaves:
            if isinstance(leaf, AddedLinear) and leaf.adding:
                leaf.add_to(y.narrow(-1, start, leaf.out_features), x, scale)
            start += leaf.out_features
        return y
    parts = [
        leaf.added(x)
        if isinstance(leaf, AddedLinear) and leaf.adding
        else x.new_zeros(*x.shape[:-1], leaf.out_features)
        for leaf in leaves
    ]
    return torch.add(y, parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1), alpha=scale)
