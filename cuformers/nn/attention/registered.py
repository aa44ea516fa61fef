"""Attention functions of the user's own, with the signature that Transformers gives them."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.nn.attention.backend import AttentionProblem, AttentionSpec, lacks
from cuformers.nn.step import Step

TAKEN = (
    "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", "triton",
    "deterministic",
)  # fmt: skip
"""Names that mean backends of this library."""
ARGUMENTS = {"window": "sliding_window", "softcap": "softcap", "sinks": "s_aux"}
"""What a layer may ask for, and the argument that tells the function."""


class _Names:
    """Functions by name. A class of its own has names of its own."""

    known: ClassVar[dict[str, Callable[..., Any]]]

    @classmethod
    def register(cls, key: str, value: Callable[..., Any]) -> None:
        """Gives a function a name; a name that is taken is given anew, for choices that follow.

        Raises:
            ValueError: the name is none or one of ours, or the function can't be called.
        """
        if not isinstance(key, str) or not key or set(key) & set("/:@|") or key in TAKEN:
            raise bad_argument("key", key, f"a name without any of / : @ |, and none of {TAKEN}")
        if not callable(value):
            raise bad_argument("value", value, "a function")
        cls.known[key] = value


class AttentionInterface(_Names):
    """Names for attn_implementation: `AttentionInterface.register("mine", function)`.

    The function is called as Transformers calls it: function(module, query [B, heads, S, d], key [B, kv_heads, S, d],
    value, attention_mask, scaling=..., dropout=0.0) -> (output [B, S, heads, d], anything). It gets one sequence at a
    time, or all where they are of one length, never any padding; it is to be causal by itself (`module.is_causal` is
    True), as attention_mask is None unless `AttentionMaskInterface` has a function of the same name. Layers with a
    window, a softcap or sinks pass sliding_window, softcap or s_aux too: a function whose signature does not name them
    is refused for such a model, but for windows where there is a mask function.
    """

    known: ClassVar[dict[str, Callable[..., Any]]] = {}


class AttentionMaskInterface(_Names):
    """Mask functions for attention functions of the same name.

    They are called as Transformers calls them: function(batch_size=, q_length=, kv_length=, q_offset=0, kv_offset=0,
    mask_function=, attention_mask=None, allow_is_causal_skip=, dtype=, device=), where mask_function(batch, head,
    query, key) tells what is seen. What they return is the attention function's attention_mask.
    """

    known: ClassVar[dict[str, Callable[..., Any]]] = {}


@dataclass(frozen=True)
class AttentionModule:
    """What stands for the module in the call: what functions read of it."""

    layer_idx: int
    head_dim: int
    num_key_value_groups: int
    scaling: float
    sliding_window: int | None
    is_causal: bool = True
    training: bool = False
    """Never True: there is no dropout."""


class RegisteredAttention:
    """A registered function as a backend."""

    def __init__(self, name: str, function: Callable[..., Any], mask: Callable[..., Any] | None = None) -> None:
        self.name = name
        self._function, self._mask = function, mask

    def why_not(self, problem: AttentionProblem) -> str | None:
        known = signature(self._function)
        named = {n for n, p in known.parameters.items() if p.kind is not Parameter.VAR_KEYWORD}
        can = {feature for feature, argument in ARGUMENTS.items() if argument in named}
        can |= {"window"} if self._mask else set()
        missing = lacks(problem, *can, "value heads of another size")
        if missing is not None:
            names = [ARGUMENTS[feature] for feature in problem.asks if feature in ARGUMENTS and feature not in can]
            return f"{missing}: its signature does not name {', '.join(names)}" if names else missing
        try:
            known.bind(None, None, None, None, None, scaling=1.0, dropout=0.0)
        except TypeError as reason:
            return f"can't be called as (module, query, key, value, attention_mask, scaling=, dropout=): {reason}"
        return None

    def can_capture(self, problem: AttentionProblem) -> bool:
        return False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        if not q.numel():
            return q.new_empty(*q.shape[:2], v.shape[-1])
        assert step.query_lengths is not None, "a registered function needs the lengths on the host"
        size = step.uniform
        if size:
            q, k, v = (x.unflatten(0, (-1, size)) for x in (q, k, v))
            return self._call(q, k, v, spec, sinks).flatten(0, 1)
        parts = zip(*(x.split(step.query_lengths) for x in (q, k, v)))
        return torch.cat([self._call(q[None], k[None], v[None], spec, sinks)[0] for q, k, v in parts])

    def _call(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        """q [N, S, heads, d], k and v [N, S, kv_heads, d] -> [N, S, heads, d]."""
        groups = spec.num_heads // spec.num_kv_heads
        module = AttentionModule(spec.layer, spec.head_dim, groups, spec.scale, spec.window)
        options = {"sliding_window": spec.window, "softcap": spec.softcap, "s_aux": sinks}
        known = signature(self._function).parameters
        asked = {name: value for name, value in options.items() if value is not None and name in known}
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        mask = self._mask_of(q, spec)
        out = self._function(module, *heads_first, mask, scaling=spec.scale, dropout=0.0, **asked)
        out = out[0] if isinstance(out, tuple) else out
        expected = (*q.shape[:3], v.shape[-1])
        if not isinstance(out, Tensor) or tuple(out.shape) != expected:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out)
            raise ValueError(f"attention function {self.name!r} must return a tensor {expected}, got {got}.")
        return out

    def _mask_of(self, q: Tensor, spec: AttentionSpec) -> Any:
        if self._mask is None:
            return None
        length, window = q.shape[1], spec.window
        hidden = window is not None and window < length

        def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
            seen = key <= query
            return seen & (key > query - window) if hidden else seen

        return self._mask(
            batch_size=q.shape[0], q_length=length, kv_length=length, q_offset=0, kv_offset=0, mask_function=visible,
            attention_mask=None, allow_is_causal_skip=not hidden, dtype=q.dtype, device=q.device,
        )  # fmt: skip


def registered(name: str) -> RegisteredAttention | None:
    """The backend of a registered name; None where the name is not registered."""
    function = AttentionInterface.known.get(name)
    return None if function is None else RegisteredAttention(name, function, AttentionMaskInterface.known.get(name))
