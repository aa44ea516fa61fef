"""Functions with FlashAttention's variable-length signature, of whichever package, and what each of them can."""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor

from cuformers.nn.attention.backend import BOTH_WAYS, AttentionSpec
from cuformers.nn.step import Step

SINK_NAMES = ("learnable_sink", "s_aux")
"""What packages call the learned score of a head."""


class Varlen(NamedTuple):
    """One such function."""

    attend: Callable[[Tensor, Tensor, Tensor, AttentionSpec, Step, Tensor | None], Tensor]
    """Its arguments are those of a backend's `forward`."""
    origin: str
    """Where it comes from, for messages."""
    can: tuple[str, ...]
    """What it can beyond plain causal attention, by the names of `AttentionProblem.asks`."""


def window_of(spec: AttentionSpec, unbounded: Any = -1) -> tuple[Any, Any]:
    """How many tokens a query sees to its left and to its right; `unbounded` is how a package writes all of them."""
    reach = unbounded if spec.window is None else spec.window - 1
    return reach, 0 if spec.causal else reach


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
) -> Tensor:
    """torch.nn.attention.varlen: FlashAttention-2 inside, causal written as the window (-1, 0)."""
    from torch.nn.attention.varlen import varlen_attn

    assert sinks is None and spec.softcap is None, "refused by why_not"
    grouped: dict[str, Any] = {"enable_gqa": True} if spec.num_heads != spec.num_kv_heads and _takes_gqa() else {}
    longest, bounds = step.longest, step.cu_seqlens
    assert bounds is not None, "a full step carries cu_seqlens"
    window = window_of(spec)
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=spec.scale, window_size=window, **grouped)
    assert isinstance(out, Tensor)
    return out


@cache
def _takes_gqa() -> bool:
    """Whether this torch wants to be told of grouped heads; torch 2.11 takes them without."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


BUILT_IN = Varlen(torch_varlen, "PyTorch's built-in copy", ("window", BOTH_WAYS))


def adapted(function: Callable[..., Any], origin: str) -> Varlen:
    """A package's `flash_attn_varlen_func`: FlashAttention 2, 3 and 4 differ in names, which its signature tells.

    Args:
        function: takes q [T, heads, d], k and v, cu_seqlens_q, ..., and returns the output, or a tuple that begins
            with it.
        origin: for messages.

    Raises:
        ValueError: its signature is another one.
    """
    known = signature(function).parameters
    needed = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal", "window_size")
    missing = [name for name in needed if name not in known]
    if missing:
        raise ValueError(f"{origin}: its arguments are not those of flash_attn_varlen_func: {missing} are missing.")
    unbounded = known["window_size"].default[0]  # -1 in versions 2 and 3, None in version 4
    sink_name = next((name for name in SINK_NAMES if name in known), None)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        options: dict[str, Any] = {"softmax_scale": spec.scale, "causal": spec.causal}
        options["window_size"] = window_of(spec, unbounded)
        if spec.softcap is not None:
            options["softcap"] = spec.softcap
        if sinks is not None:
            assert sink_name is not None, "refused by why_not"
            options[sink_name] = sinks
        out = function(
            q, k, v, cu_seqlens_q=step.cu_seqlens, cu_seqlens_k=step.cu_seqlens, max_seqlen_q=step.longest,
            max_seqlen_k=step.longest, **options,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    can = ["window", BOTH_WAYS, *(["softcap"] if "softcap" in known else []), *(["sinks"] if sink_name else [])]
    return Varlen(attend, origin, tuple(can))
