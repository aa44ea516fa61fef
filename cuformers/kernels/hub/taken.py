"""What was decided about each layer of a KernelConfig, and how the list of a model's kernels shows it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cuformers.kernels.hub.layers import Kind, Layer
from cuformers.kernels.op import Choice, Implementation

WHOLE: dict[Kind, tuple[str, ...]] = {
    "norm": ("rms_norm", "add_rms_norm", "rms_norm_add"),
    "activation": ("gated_activation",),
    "gated": ("gated_activation",),
    "rotary": (),
}
"""Kind of layer -> the ops that it computes."""
PART: dict[Kind, tuple[str, ...]] = {
    "norm": ("linear", "gated_linear", "rope_cache", "decode_attention"),
    "activation": ("gated_linear",),
    "gated": ("gated_linear",),
    "rotary": ("rope_cache", "decode_attention"),
}
"""Kind of layer -> the ops that leave it a part of their work."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A layer of the config, and what serves it."""

    name: str
    layer: Layer
    kernel: str
    """Name for the list of kernels."""
    function: Callable[..., Any] | None
    """None where our own kernels keep the layer."""
    why: str
    """Why it was taken, or why not."""
    captures: bool = True
    """Whether a CUDA graph can hold it."""


def amended(choice: Choice, function: Callable, taken: Sequence[Taken]) -> Choice:
    """An op's choice with what the layers changed of it; `function` is the one that the op has now."""
    for t in taken:
        if choice.op in (*WHOLE[t.layer.kind], *PART[t.layer.kind]):
            choice = _amended_by(t, choice, function)
    return choice


def _amended_by(taken: Taken, choice: Choice, function: Callable) -> Choice:
    if taken.function is None:
        return replace(choice, refused={**choice.refused, taken.kernel: taken.why})
    own = choice.implementation
    captures = own.captures and taken.captures
    if choice.op in PART[taken.layer.kind]:
        why = f"{taken.name} is taken out of it: {taken.kernel}"
        why = f"{choice.why}; {why}" if choice.why else why
        return replace(choice, implementation=replace(own, captures=captures), function=function, why=why)
    made = Implementation(
        name=taken.kernel,
        load=partial(_same, function),
        modes=frozenset({choice.mode}),
        captures=taken.captures,
    )
    refused = dict(choice.refused)
    if own.name != made.name:
        refused[own.name] = f"kernel_config names another for {taken.name}"
    return replace(choice, implementation=made, refused=refused, function=function, why=taken.why)


def _same(function: Callable) -> Callable:
    return function
