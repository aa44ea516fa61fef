"""What an attention backend is, and what a layer tells it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cuformers.nn.step import Step

BOTH_WAYS = "attention to later tokens"
"""What a model that is not causal asks of a backend, as `lacks` names it."""


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
    """A query sees the keys less than so many tokens away, its own included; None means at any distance."""
    causal: bool = True
    """A query sees no key after its own; False looks both ways, and so does the window."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    rope: str | None = "default"
    """Name of the rotary embedding; None means no positions in this layer."""
    sinks: bool = False
    """Each query head has a learned score that takes part in the softmax and has no value (gpt-oss)."""
    v_head_dim: int | None = None
    """Elements of a value head where they are not those of a key head (latent attention)."""


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """What a whole model asks of a backend, for `why_not`."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    softcap: bool
    window: bool
    sinks: bool = False
    v_head_dim: int | None = None
    """Elements of a value head where they are not head_dim."""
    causal: bool = True
    train: bool = False
    """Whether gradients are asked for."""

    @property
    def asks(self) -> tuple[str, ...]:
        """What goes beyond plain causal attention, by names for `lacks`."""
        features = {
            "softcap": self.softcap,
            "window": self.window,
            "sinks": self.sinks,
            BOTH_WAYS: not self.causal,
            "value heads of another size": self.v_head_dim not in (None, self.head_dim),
        }
        return tuple(name for name, asked in features.items() if asked)


def lacks(problem: AttentionProblem, *can: str) -> str | None:
    """What the problem asks for that is not among what a backend can; None where nothing is."""
    missing = [name for name in problem.asks if name not in can]
    return f"has no {' and no '.join(missing)}" if missing else None


class AttentionBackend(Protocol):
    """Computes attention over a flat stream in which every sequence brings its own keys."""

    name: str

    def why_not(self, problem: AttentionProblem) -> str | None:
        """The reason why this backend can't serve the problem; None where it can."""
        ...

    def can_capture(self, problem: AttentionProblem) -> bool:
        """Whether `forward` may be recorded in a CUDA graph: all lengths are read on the device."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, dv], sinks [heads] where the spec has them
        -> [T, heads, dv]."""
        ...


def problem_of(specs: Sequence[AttentionSpec], weight: Tensor) -> AttentionProblem:
    """What a model with these layers asks of a backend, where its weights are."""
    return AttentionProblem(
        device=weight.device,
        dtype=weight.dtype,
        head_dim=max((s.head_dim for s in specs), default=0),
        softcap=any(s.softcap is not None for s in specs),
        window=any(s.window is not None for s in specs),
        sinks=any(s.sinks for s in specs),
        v_head_dim=next((s.v_head_dim for s in specs if s.v_head_dim is not None), None),
        causal=all(s.causal for s in specs),
    )
