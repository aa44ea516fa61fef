"""The attention block of a decoder layer: project, norm and rotate, attend, project back."""

from typing import Any

import torch
from torch import Tensor, nn

from cuformers.kernels.cache_scales import CacheScales
from cuformers.kernels.norm_args import Norm
from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.kernel_module import KernelModule
from cuformers.nn.norm import RMSNorm
from cuformers.nn.project import project
from cuformers.nn.step import CacheView, Chunks, Step


class Attention(KernelModule):
    """Grouped-query attention with the checkpoint's own parameter names.

    `qkv_bias` and `out_bias` add biases; `qk_norm`, an epsilon and an offset, normalises every query and key head.
    `sinks` is a score for each query head, where the spec has them.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        assert spec.v_head_dim in (None, spec.head_dim), "this block's value heads have the size of its key heads"
        self.spec = spec
        self._make_input(hidden_size, qkv_bias)
        self._make_output(hidden_size, out_bias)
        self.sinks = nn.Parameter(torch.empty(spec.num_heads)) if spec.sinks else None
        self.has_qk_norm = qk_norm is not None
        if qk_norm is not None:
            self.q_norm = RMSNorm(spec.head_dim, *qk_norm)
            self.k_norm = RMSNorm(spec.head_dim, *qk_norm)

    def _make_input(self, hidden_size: int, bias: bool) -> None:
        spec = self.spec
        self.q_proj = nn.Linear(hidden_size, spec.num_heads * spec.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, spec.num_kv_heads * spec.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, spec.num_kv_heads * spec.head_dim, bias=bias)

    def _make_output(self, hidden_size: int, bias: bool) -> None:
        self.o_proj = nn.Linear(self.spec.num_heads * self.spec.head_dim, hidden_size, bias=bias)

    @property
    def output(self) -> nn.Module:
        """The map from the heads' outputs back to the stream."""
        return self.o_proj

    @property
    def leaves(self) -> tuple[nn.Module, ...]:
        """The maps whose outputs are queries, keys and values, in this order."""
        return self.q_proj, self.k_proj, self.v_proj

    def storage_groups(self) -> tuple[tuple[str, ...], ...]:
        """Parameters to lay out one after the other, so that they can be used as one."""
        names = ("q_proj", "k_proj", "v_proj")
        kinds = ("weight",) if self.q_proj.bias is None else ("weight", "bias")
        return tuple(tuple(f"{name}.{kind}" for name in names) for kind in kinds)

    def _qkv(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """[T, H] -> [T, (heads + 2 * kv_heads) * head_dim]."""
        return project(self.ops, x, self.leaves, norm=norm)

    def forward(
        self,
        x: Tensor,
        step: Step,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """residual + scale * attention(norm(x)): [T, H] -> [T, H]."""
        out = self._attend(self._qkv(x, norm), step)
        return project(self.ops, out.flatten(1), (self.output,), residual=residual, scale=scale)

    def _attend(self, qkv: Tensor, step: Step) -> Tensor:
        """Projected rows [T, (heads + 2 * kv_heads) * head_dim] -> [T, heads, head_dim]; keys and values are kept."""
        if step.phase == "cached" and step.chunks is None:
            return self._decode(qkv, step)
        spec, view = self.spec, step.cache
        cached: dict[str, Any] = {}
        if view is not None:
            slots = view.slots[view.cache.group(spec.layer)]
            cached = {"k_cache": view.cache.keys(spec.layer), "v_cache": view.cache.values(spec.layer), "slots": slots}
            cached |= self._scales(view)
        q, k, v = self.ops.rope_cache(
            qkv,
            *self._rope(step),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            **self._norms(),
            **cached,
        )
        if step.chunks is not None:
            return self._attend_chunks(q, k, v, step, step.chunks)
        assert step.backend is not None, "a full step names its attention backend"
        return step.backend.forward(q, k, v, spec, step, self.sinks)

    def _rope(self, step: Step) -> tuple[Tensor | None, Tensor | None, Tensor]:
        return (step.rope[self.spec.rope] if step.rope and self.spec.rope else None) or (None, None, step.positions)

    def _norms(self) -> dict[str, Norm | None]:
        q_norm, k_norm = (self.q_norm.args, self.k_norm.args) if self.has_qk_norm else (None, None)
        return {"q_norm": q_norm, "k_norm": k_norm}

    def _scales(self, view: CacheView) -> dict[str, CacheScales]:
        """What ops are told of an fp8 cache; they have no such argument in a deterministic model, which has none."""
        scales = view.cache.scales(self.spec.layer)
        return {} if scales is None else {"scales": scales}

    def _decode(self, qkv: Tensor, step: Step) -> Tensor:
        """A step in which every row brings one token."""
        spec, view = self.spec, step.cache
        assert view is not None, "a cached step has a cache"
        group = view.cache.group(spec.layer)
        return self.ops.decode_attention(
            qkv,
            *self._rope(step),
            view.cache.keys(spec.layer),
            view.cache.values(spec.layer),
            view.slots[group],
            view.block_tables[group],
            step.lengths,
            num_heads=spec.num_heads,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=self.sinks,
            plan=step.plans.get(spec.window),
            newest=step.newest,
            **self._norms(),
            **self._scales(view),
        )

    def _attend_chunks(self, q: Tensor, k: Tensor, v: Tensor, step: Step, chunks: Chunks) -> Tensor:
        """A step of chunks, then rows; the keys of both are in the cache by now."""
        spec, view, t = self.spec, step.cache, chunks.tokens
        assert view is not None, "a cached step has a cache"
        group = view.cache.group(spec.layer)
        caches = (view.cache.keys(spec.layer), view.cache.values(spec.layer), view.block_tables[group])
        options: dict[str, Any] = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap}
        options |= {"sinks": self.sinks, **self._scales(view)}
        if chunks.fresh:
            assert step.backend is not None, "chunks that bring their keys along name an attention backend"
            first = step.backend.forward(q[:t], k[:t], v[:t], spec, step, self.sinks)
        else:
            first = self.ops.chunk_attention(q[:t], *caches, chunks.bounds, chunks.rows, chunks.lengths, **options)
        if not step.lengths.numel():
            return first
        keys, values, tables = caches
        tables = tables[: q.shape[0] - t]
        plan = step.plans.get(spec.window)
        rest = self.ops.paged_attention(q[t:], keys, values, tables, step.lengths, plan=plan, **options)
        return torch.cat((first, rest))
