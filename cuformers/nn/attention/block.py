"""The attention block of a decoder layer: project, norm and rotate, attend, project back."""

from torch import Tensor, nn

from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.kernel_module import KernelModule
from cuformers.nn.norm import RMSNorm
from cuformers.nn.project import project
from cuformers.nn.step import Step


class Attention(KernelModule):
    """Grouped-query attention with the checkpoint's own parameter names.

    `qkv_bias` and `out_bias` add biases; `qk_norm`, an epsilon and an offset, normalises every query and key head.
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
        self.spec = spec
        self._make_input(hidden_size, qkv_bias)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, hidden_size, bias=out_bias)
        self.has_qk_norm = qk_norm is not None
        if qk_norm is not None:
            self.q_norm = RMSNorm(spec.head_dim, *qk_norm)
            self.k_norm = RMSNorm(spec.head_dim, *qk_norm)

    def _make_input(self, hidden_size: int, bias: bool) -> None:
        spec = self.spec
        self.q_proj = nn.Linear(hidden_size, spec.num_heads * spec.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, spec.num_kv_heads * spec.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, spec.num_kv_heads * spec.head_dim, bias=bias)

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
        return project(self.ops, out.flatten(1), (self.o_proj,), residual=residual, scale=scale)

    def _attend(self, qkv: Tensor, step: Step) -> Tensor:
        """Projected rows [T, (heads + 2 * kv_heads) * head_dim] -> [T, heads, head_dim]; keys and values are kept."""
        spec, view = self.spec, step.cache
        rope = step.rope[spec.rope] if step.rope and spec.rope else None
        cos, sin, rows = rope or (None, None, step.positions)
        q_norm, k_norm = (self.q_norm.args, self.k_norm.args) if self.has_qk_norm else (None, None)
        k_cache, v_cache = (view.cache.keys(spec.layer), view.cache.values(spec.layer)) if view else (None, None)
        if step.phase == "decode":
            assert view is not None, "a decode step has a cache"
            return self.ops.decode_attention(
                qkv,
                cos,
                sin,
                rows,
                k_cache,
                v_cache,
                view.slots,
                view.block_tables,
                step.lengths,
                num_heads=spec.num_heads,
                scale=spec.scale,
                q_norm=q_norm,
                k_norm=k_norm,
                window=spec.window,
                softcap=spec.softcap,
            )
        q, k, v = self.ops.rope_cache(
            qkv,
            cos,
            sin,
            rows,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            k_cache=k_cache,
            v_cache=v_cache,
            slots=view.slots if view else None,
        )
        assert step.backend is not None, "a full step names its attention backend"
        return step.backend.forward(q, k, v, spec, step)
