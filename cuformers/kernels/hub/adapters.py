"""A hub layer's class as a function of tensors: its forward, called on a stand-in that holds a module's attributes."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cuformers.kernels.gated_linear.reference import gated_activation
from cuformers.kernels.hub.layers import Layer
from cuformers.kernels.norm.reference import rms_norm
from cuformers.kernels.op import Mode
from cuformers.kernels.precision import wide
from cuformers.kernels.rope_cache.reference import rotate


def contract_problem(cls: object, layer: Layer) -> str | None:
    """Why a class can't stand for a layer of this kind; None where it can."""
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        return "is no module class"
    if cls.__init__ is not nn.Module.__init__:
        return "has a constructor: a kernel layer keeps no state of its own"
    try:
        inspect.signature(cls.forward).bind(None, *range(layer.parameters))
    except TypeError as problem:
        return f"has a forward that does not take the layer's {layer.parameters} tensors ({problem})"
    return None


class StandIns:
    """Makes the modules that a layer's forward is called on; each call has its own, so that threads don't meet."""

    def __init__(self, cls: type[nn.Module], mode: Mode) -> None:
        self._template = cls().train(mode == "train")

    def __call__(self, **attributes: Any) -> Any:
        """A module with these attributes, without the cost of nn.Module's constructor."""
        module = object.__new__(type(self._template))
        module.__dict__.update(self._template.__dict__, **attributes)
        return module


def adapt(cls: type[nn.Module], layer: Layer, mode: Mode) -> Callable[..., Any]:
    """The layer as the function that `compose.Parts` wants for its kind."""
    stand_in = StandIns(cls, mode)

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return stand_in(weight=weight, variance_epsilon=eps, eps=eps).forward(x)

    def activation(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return stand_in().forward(gate.contiguous()) * up

    def gated(gate_up: Tensor) -> Tensor:
        return stand_in().forward(gate_up)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return _rotate_as_transformers(stand_in().forward, q, k, cos, sin)

    return {"norm": norm, "activation": activation, "gated": gated, "rotary": rotary}[layer.kind]


def _rotate_as_transformers(
    forward: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """[T, heads, D] and [T, rot / 2] as [1, heads, T, rot] and [1, T, rot] in the queries' dtype, and back."""
    rot = 2 * cos.shape[-1]
    cos, sin = (torch.cat((f, f), dim=-1)[None].to(q.dtype) for f in (cos, sin))
    new_q, new_k = forward(*(x[..., :rot].transpose(0, 1)[None] for x in (q, k)), cos, sin)
    return _joined(new_q[0].transpose(0, 1), q[..., rot:]), _joined(new_k[0].transpose(0, 1), k[..., rot:])


def _joined(turned: Tensor, rest: Tensor) -> Tensor:
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def plain(layer: Layer) -> Callable[..., Any]:
    """The same function in plain PyTorch: the specification, in float32 (float64 for float64) and rounded once."""

    def gated(gate_up: Tensor) -> Tensor:
        return gated_activation(gate_up, layer.activation)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        factors = wide(cos)[:, None], wide(sin)[:, None]
        return rotate(wide(q), *factors).to(q.dtype), rotate(wide(k), *factors).to(k.dtype)

    return {"norm": rms_norm, "activation": gated, "gated": gated, "rotary": rotary}[layer.kind]
