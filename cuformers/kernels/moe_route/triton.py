"""Softmax routing with top-k: a warp for each token, which takes its largest logit k times."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels.launch import pdl
from cuformers.kernels.moe_route import Routes

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def route_kernel(
    logits_ptr, weights_ptr, ids_ptr, E,
    TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, NORMALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [T]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, BLOCK_K)
    x = tl.load(logits_ptr + row * E + expert, mask=expert < E, other=NEGATIVE_INFINITY).to(tl.float32)
    ranked = tl.where(x == x, x, NEGATIVE_INFINITY)
    top = tl.max(ranked, axis=0)
    total = tl.sum(tl.where(expert < E, tl.exp(x - top), 0.0), axis=0)  # NaN where there is one
    free = expert < E
    chosen = tl.zeros((BLOCK_K,), dtype=tl.float32)
    ids = tl.zeros((BLOCK_K,), dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(tl.where(free, ranked, NEGATIVE_INFINITY), axis=0)
        found = tl.min(tl.where(free & (ranked == best), expert, BLOCK_E), axis=0)
        free = free & (expert != found)
        chosen = tl.where(slot == k, tl.exp(best - top) / total, chosen)
        ids = tl.where(slot == k, found, ids)
    if NORMALISE:
        chosen = chosen / tl.sum(chosen, axis=0)
    tl.store(weights_ptr + row * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(ids_ptr + row * TOP_K + slot, ids, mask=slot < TOP_K)


def moe_route(logits: Tensor, top_k: int, *, normalise: bool) -> Routes:
    """See the package."""
    T, E = logits.shape
    assert 0 < top_k <= E, "a token goes to 1 to E experts"
    logits = logits.detach().contiguous()
    weights = torch.empty(T, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(T, top_k, dtype=torch.int32, device=logits.device)
    if T:
        blocks = {"BLOCK_E": triton.next_power_of_2(E), "BLOCK_K": triton.next_power_of_2(top_k)}
        flags = {"TOP_K": top_k, "NORMALISE": normalise, "num_warps": 1, **pdl(logits.device)}
        route_kernel[(T,)](logits, weights, ids, E, **blocks, **flags)
    return Routes(weights, ids)
