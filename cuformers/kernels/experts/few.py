"""Launches for one to four tokens."""

from typing import Any

import torch
import triton
from torch import Tensor

from cuformers.kernels.experts.config import FewConfig, few_down, few_up
from cuformers.kernels.experts.few_kernel import down_kernel, up_kernel
from cuformers.kernels.launch import pdl, sms


def up(x: Tensor, gate_up: Tensor, ids: Tensor, activation: str, cut: FewConfig | None = None) -> Tensor:
    """act(gate) * up of each pair: [T * k, I]. `cut` overrides the rule, for tuning."""
    P, K, N = ids.numel(), x.shape[1], gate_up.shape[1] // 2
    cut = cut or few_up(N, K, P, sms(x.device))
    h = torch.empty(P, N, dtype=x.dtype, device=x.device)
    flags: dict[str, Any] = {"TOP_K": ids.shape[1], "ACTIVATION": activation}
    up_kernel[triton.cdiv(N, cut.block_n), P](x, gate_up, ids, h, N, **flags, **_options(cut, K, x.device))
    return h


def down(
    h: Tensor,
    weight: Tensor,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor | None,
    scale: float,
    cut: FewConfig | None = None,
) -> Tensor:
    """residual + scale * the weighted sum over a token's experts of weight [E, N, K] by h [T * k, K]: [T, N]."""
    (T, top_k), (_, N, K) = ids.shape, weight.shape
    cut = cut or few_down(K, top_k)
    y = torch.empty(T, N, dtype=h.dtype, device=h.device)
    flags: dict[str, Any] = {"TOP_K": top_k, "AT_ONCE": cut.at_once, "RESIDUAL": residual is not None}
    operands = (h, weight, ids, weights, y if residual is None else residual, y, N, float(scale))
    down_kernel[triton.cdiv(N, cut.block_n), T](*operands, **flags, **_options(cut, K, h.device))
    return y


def _options(cut: FewConfig, K: int, device: torch.device) -> dict[str, Any]:
    blocks = {"K": K, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k, "CHUNKS": triton.cdiv(K, cut.block_k)}
    return {**blocks, "COPIES": cut.copies, "num_warps": cut.num_warps, "num_stages": 1, **pdl(device)}
