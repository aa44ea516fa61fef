"""A decode step's attention from the projected row on, as two or three launches.

One launch for all of it was tried twice and was slower on an H200: docs/log.md, 2026-12-01.
"""

from torch import Tensor

from cuformers.kernels.attention_plan import AttentionPlan
from cuformers.kernels.cache_scales import CacheScales
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.paged_attention.triton import AttentionConfig, paged_attention
from cuformers.kernels.rope_cache.triton import rope_cache


def decode_attention(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    scale: float,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: CacheScales | None = None,
    plan: AttentionPlan | None = None,
    newest: int = 1,
    cut: AttentionConfig | None = None,
) -> Tensor:
    """See the package. `cut` overrides the rule of the attention kernel, for tuning."""
    q, _, _ = rope_cache(
        qkv,
        cos,
        sin,
        rows,
        num_heads=num_heads,
        num_kv_heads=k_cache.shape[1],
        head_dim=k_cache.shape[3],
        q_norm=q_norm,
        k_norm=k_norm,
        k_cache=k_cache,
        v_cache=v_cache,
        slots=slots,
        scales=scales,
    )
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "scales": scales}
    options |= {"plan": plan, "newest": newest, "cut": cut}
    return paged_attention(q, k_cache, v_cache, block_tables, lengths, **options)
