"""FlashAttention-2: the `flash_attn` package where it is installed, else PyTorch's built-in copy of it."""

from collections.abc import Callable

import torch
from torch import Tensor

from cuformers.cuda.device import capability
from cuformers.nn.attention.backend import BOTH_WAYS, AttentionProblem, AttentionSpec, lacks
from cuformers.nn.step import Step

VARLEN_DTYPES = frozenset({torch.bfloat16, torch.float16})
VARLEN_MAX_HEAD_DIM = 256
VARLEN_CAPABILITY = (8, 0)


def varlen_fits(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether PyTorch's varlen_attn takes these."""
    new_enough = (capability(device) or (0, 0)) >= VARLEN_CAPABILITY
    return new_enough and dtype in VARLEN_DTYPES and head_dim <= VARLEN_MAX_HEAD_DIM


def window_of(spec: AttentionSpec) -> tuple[int, int]:
    """How far a query sees to the left and to the right, -1 for as far as there are keys."""
    reach = -1 if spec.window is None else spec.window - 1
    return reach, 0 if spec.causal else reach


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step) -> Tensor:
    """torch.nn.attention.varlen: FlashAttention-2 inside, causal written as the window (-1, 0)."""
    from torch.nn.attention.varlen import varlen_attn

    window = window_of(spec)
    longest, bounds = step.longest, step.cu_seqlens
    assert bounds is not None, "a full step carries cu_seqlens"
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=spec.scale, window_size=window)
    assert isinstance(out, Tensor)
    return out


def package_varlen(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step) -> Tensor:
    """The flash_attn package's varlen kernel; the only one of the two with softcap."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    longest, bounds = step.longest, step.cu_seqlens
    return flash_attn_varlen_func(
        q, k, v, bounds, bounds, longest, longest,
        softmax_scale=spec.scale, causal=spec.causal, window_size=window_of(spec), softcap=spec.softcap or 0.0,
    )  # fmt: skip


def package_problem() -> str | None:
    """Why the flash_attn package can't be used; None where it imports."""
    try:
        import flash_attn  # type: ignore[import-not-found] # noqa: F401
    except ImportError as problem:  # absent, or built for another torch: both are found here, at load
        return f"the package flash_attn does not import ({problem})"
    return None


class FlashAttention2:
    """attn_implementation="flash_attention_2"."""

    name = "flash_attention_2"

    def __init__(self) -> None:
        self._without_package = package_problem()
        self._varlen: Callable[..., Tensor] = torch_varlen if self._without_package else package_varlen

    def why_not(self, problem: AttentionProblem) -> str | None:
        if (capability(problem.device) or (0, 0)) < VARLEN_CAPABILITY:
            return "needs an NVIDIA GPU of compute capability 8.0 or newer"
        if problem.dtype not in VARLEN_DTYPES:
            return f"takes bfloat16 and float16, not {problem.dtype}"
        if problem.head_dim > VARLEN_MAX_HEAD_DIM:
            return f"takes a head_dim up to {VARLEN_MAX_HEAD_DIM}, not {problem.head_dim}"
        if problem.softcap and self._without_package:
            return f"PyTorch's built-in copy has no softcap, and {self._without_package}"
        return lacks(problem, "window", "softcap", BOTH_WAYS)

    def can_capture(self, problem: AttentionProblem) -> bool:
        return True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "refused by why_not"
        return self._varlen(q, k, v, spec, step)
