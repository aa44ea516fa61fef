"""What a model has of the layers that others' kernels may compute."""

from collections.abc import Iterable
from typing import TypeVar

from torch import nn

from cuformers.kernels.hub.layers import Uses
from cuformers.nn.attention.block import Attention
from cuformers.nn.backbone import Backbone
from cuformers.nn.mlp import GatedMLP
from cuformers.nn.norm import RMSNorm
from cuformers.nn.rope import Rotary

T = TypeVar("T")


def uses_of(model: Backbone) -> Uses:
    """The shapes of a model's norms, gated blocks and rotations."""
    modules = list(model.modules())
    norms = [m for m in modules if isinstance(m, RMSNorm)]
    blocks = [m for m in modules if isinstance(m, GatedMLP)]
    rotated = [m for m in modules if isinstance(m, Attention) and m.spec.rope is not None]
    return Uses(
        norms=_once((norm.weight.numel(), norm.eps) for norm in norms),
        num_norms=len(norms),
        plain_norms=all(norm.offset == 0.0 for norm in norms),
        activations=_once((block.activation, block.intermediate_size) for block in blocks),
        num_blocks=len(blocks),
        rotations=_once(_rotation(attention, model.rotary.by_name) for attention in rotated),
        num_rotated=len(rotated),
    )


def _rotation(attention: Attention, rotaries: nn.ModuleDict) -> tuple[int, int, int, int]:
    spec = attention.spec
    assert spec.rope is not None, "a layer that rotates names its embedding"
    rotary = rotaries[spec.rope]
    assert isinstance(rotary, Rotary)
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, rotary.spec.dim


def _once(found: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(found))
