"""Decode attention with its prologue: the attention kernel, given projected rows."""

from torch import Tensor

from cuformers.kernels.norm_args import Norm
from cuformers.kernels.paged_attention.triton import AttentionConfig, Prologue, check_cache, launch
from cuformers.kernels.paged_attention.workspace import Workspace


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
    workspace: Workspace | None = None,
    cut: AttentionConfig | None = None,
) -> Tensor:
    """See the package. `cut` overrides the rule, for tuning."""
    qkv = qkv.detach()
    check_cache(k_cache, v_cache, qkv.dtype, num_heads)
    assert qkv.stride(-1) == 1, "a projected row is contiguous"
    return launch(
        qkv, num_heads, k_cache, v_cache, block_tables, lengths, scale=scale, window=window, softcap=softcap,
        sinks=None, fresh=1, workspace=workspace, cut=cut, prologue=Prologue(cos, sin, rows, slots, q_norm, k_norm),
    )  # fmt: skip
