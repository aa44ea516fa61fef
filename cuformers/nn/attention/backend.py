"""What an attention backend is, and what a layer tells it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cuformers.nn.step import Step


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer."""

    layer: int
    """Index of the layer, which is also its place in the cache."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key-value heads; each serves num_heads / num_kv_heads query heads in a row."""
    head_dim: int
    """Elements of a head."""
    scale: float
    """Multiplies the scores before the softmax."""
    window: int | None = None
    """A query sees this many keys, its own included; None means all before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    rope: str | None = "default"
    """Name of the rotary embedding; None means no positions in this layer."""


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """What a whole model asks of a backend, for `why_not`."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    softcap: bool
    window: bool
    train: bool = False


class AttentionBackend(Protocol):
    """Computes causal attention over a flat stream in which every sequence brings its own keys."""

    name: str

    def why_not(self, problem: AttentionProblem) -> str | None:
        """The reason why this backend can't serve the problem; None where it can."""
        ...

    def can_capture(self, problem: AttentionProblem) -> bool:
        """Whether `forward` may be recorded in a CUDA graph: all lengths are read on the device."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step) -> Tensor:
        """q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d]."""
        ...
