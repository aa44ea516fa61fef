"""A table of kernels whose norms, activations or rotations are others' functions.

What our ops fuse is taken apart just where a replaced function must run: the norm before a product, the activation
behind one, head norms and rotation before the cache. All else stays what it was.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cuformers.kernels.norm_args import Norm

Functions = dict[str, Callable]
"""Op -> function."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The functions that stand for parts of our ops; what is None or missing stays ours."""

    norm: Callable[[Tensor, Tensor, float], Tensor] | None = None
    """(x [..., H], weight [H], eps) -> [..., H]."""
    gated: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Activation -> (gate_up [T, 2I]) -> act(gate) * up [T, I]."""
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """(q [T, Hq, D], k [T, Hk, D], cos [T, rot / 2], sin) -> (q, k)."""


def compose(table: Functions, parts: Parts) -> Functions:
    """The functions that differ from those of the table."""
    new: Functions = {}
    if parts.norm is not None:
        new |= _with_norm(table, parts.norm)
    if parts.gated:
        new |= _with_gated({**table, **new}, parts.gated)
    if parts.norm is not None or parts.rotate is not None:
        new |= _with_heads({**table, **new}, parts)
    return new


def _with_norm(table: Functions, norm: Callable[[Tensor, Tensor, float], Tensor]) -> Functions:
    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        assert offset == 0.0, "norms with an offset keep our own kernels"
        return norm(x, weight, eps)

    def add_rms_norm(x: Tensor, residual: Tensor, *args: Tensor | float) -> tuple[Tensor, Tensor]:
        s = x + residual
        return rms_norm(s, *args), s  # type: ignore[arg-type]

    def rms_norm_add(x: Tensor, residual: Tensor, *args: Tensor | float) -> Tensor:
        y = rms_norm(x, *args)  # type: ignore[arg-type]
        if y.requires_grad:  # the addition hands one gradient to both, and a backward pass may write into its own
            y.register_hook(torch.clone)
        return residual + y

    def norm_first(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, *args: object, norm: Norm | None = None, **kwargs: object) -> Tensor:
            return product(x if norm is None else rms_norm(x, *norm), *args, **kwargs)

        return call

    products = {name: norm_first(table[name]) for name in ("linear", "gated_linear")}
    return {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "rms_norm_add": rms_norm_add, **products}


def _with_gated(table: Functions, gated: Mapping[str, Callable[[Tensor], Tensor]]) -> Functions:
    def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
        replaced = gated.get(activation)
        return table["gated_activation"](gate_up, activation) if replaced is None else replaced(gate_up)

    def gated_linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, norm: Norm | None = None
    ) -> Tensor:
        if activation not in gated:
            return table["gated_linear"](x, weight, bias, activation, norm=norm)
        return gated[activation](table["linear"](x, weight, bias, norm=norm))

    return {"gated_activation": gated_activation, "gated_linear": gated_linear}


def _with_heads(table: Functions, parts: Parts) -> Functions:
    """`rope_cache` and `decode_attention` with head norms, and the rotation where it is replaced, done before them."""

    def prepared(
        qkv: Tensor,
        rope: tuple[Tensor | None, Tensor | None, Tensor],
        heads: tuple[int, int, int],
        norms: tuple[Norm | None, Norm | None],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        (cos, sin, rows), turn = rope, parts.rotate if rope[0] is not None else None
        if turn is None and norms == (None, None):
            return qkv, cos, sin
        num_heads, num_kv_heads, head_dim = heads
        q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        q, k = (x.contiguous() for x in (q, k))  # as they come from products of their own
        q, k = (x if n is None else table["rms_norm"](x, *n) for x, n in zip((q, k), norms))
        if turn is not None:
            assert cos is not None and sin is not None, "a rotation has both factors"
            q, k = turn(q, k, cos[rows.long()], sin[rows.long()])
            cos = sin = None
        return torch.cat((q, k, v), dim=1).flatten(1), cos, sin

    def rope_cache(
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        rows: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        **cache: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        qkv, cos, sin = prepared(qkv, (cos, sin, rows), (num_heads, num_kv_heads, head_dim), (q_norm, k_norm))
        return table["rope_cache"](qkv, cos, sin, rows, **sizes, **cache)

    def decode_attention(
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        rows: Tensor,
        k_cache: Tensor,
        *caches: Tensor,
        num_heads: int,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        **options: object,
    ) -> Tensor:
        sizes = (num_heads, k_cache.shape[1], k_cache.shape[3])
        qkv, cos, sin = prepared(qkv, (cos, sin, rows), sizes, (q_norm, k_norm))
        return table["decode_attention"](qkv, cos, sin, rows, k_cache, *caches, num_heads=num_heads, **options)

    return {"rope_cache": rope_cache, "decode_attention": decode_attention}
