"""Attention written out: the oracle of all the other backends, and the one that can everything."""

import torch
from torch import Tensor

from cuformers.kernels.precision import wide
from cuformers.nn.attention.backend import AttentionProblem, AttentionSpec
from cuformers.nn.step import Step


def attention_mask(length: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """[length, length], bool: True where query i sees key j.

    That is i - window < j <= i; where the spec is not causal, i - window < j < i + window.
    """
    mask = torch.ones(length, length, dtype=torch.bool, device=device)
    if spec.causal:
        mask = mask.tril()
    elif spec.window is not None:
        mask = mask.tril(spec.window - 1)
    return mask if spec.window is None else mask.triu(1 - spec.window)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
    """One sequence: q [S, heads, d], k [S, kv_heads, d], v [S, kv_heads, dv], sinks [heads] -> [S, heads, dv].

    Scores and softmax are in float32, in float64 where the inputs are.
    """
    group = spec.num_heads // spec.num_kv_heads
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = wide(torch.matmul(q, k.transpose(1, 2))) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    mask = attention_mask(q.shape[1], spec, q.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(-1, q.shape[1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]].to(v.dtype)
    return torch.matmul(weights, v).transpose(0, 1)


class EagerAttention:
    """One sequence after the other, scores in memory."""

    name = "eager"

    def why_not(self, problem: AttentionProblem) -> str | None:
        return None

    def can_capture(self, problem: AttentionProblem) -> bool:
        return False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        if not q.numel():
            return q.new_empty(*q.shape[:2], v.shape[-1])
        assert step.query_lengths is not None, "eager attention needs the lengths on the host"
        parts = zip(*(x.split(step.query_lengths) for x in (q, k, v)))
        return torch.cat([eager_attention(q, k, v, spec, sinks) for q, k, v in parts])
