"""FlashAttention 2, 3 and 4: their packages, PyTorch's built-in copy of version 2, or kernels from the hub."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cuformers.base.log import notice
from cuformers.cuda.device import capability
from cuformers.kernels.hub import package as hub_package
from cuformers.nn.attention import hub
from cuformers.nn.attention.backend import AttentionProblem, AttentionSpec, lacks
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.attention.varlen import BUILT_IN, Varlen, adapted
from cuformers.nn.step import Step, full_step

HALF = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One version of FlashAttention and its limits, as its source states them."""

    name: str
    """As in attn_implementation."""
    module: str
    """Where its package has flash_attn_varlen_func."""
    pip: str
    """Installs the package."""
    repo: str
    """On the hub."""
    least: tuple[int, int] = (8, 0)
    """Least compute capability."""
    below: tuple[int, int] | None = None
    """Compute capability from which on it has no kernels."""
    built_in: bool = False
    """Whether PyTorch has a copy of it."""


FA2 = Generation(
    name="flash_attention_2",
    module="flash_attn",
    pip="pip install flash-attn --no-build-isolation",
    repo="kernels-community/flash-attn2",
    built_in=True,
)
FA3 = Generation(
    name="flash_attention_3",
    module="flash_attn_interface",
    pip="pip install 'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper' --no-build-isolation",
    repo="kernels-community/vllm-flash-attn3",
    below=(10, 0),
)
FA4 = Generation(
    name="flash_attention_4",
    module="flash_attn.cute",
    pip="pip install 'cuformers[fa4]'",
    repo="kernels-community/flash-attn4",
    least=(9, 0),
)


def package_problem(generation: Generation = FA2) -> str | None:
    """Why a version's package can't be used; None where it imports."""
    found = _from_package(generation)
    return found if isinstance(found, str) else None


class FlashAttention:
    """attn_implementation="flash_attention_2", "flash_attention_3" or "flash_attention_4".

    `fetch` allows to get a kernel from the hub where the package is missing.
    """

    def __init__(self, generation: Generation, *, fetch: bool = False) -> None:
        self.name = generation.name
        self._generation = generation
        found = _from_package(generation)
        self._package = found if isinstance(found, str) else None
        if isinstance(found, str) and generation.built_in:
            found = BUILT_IN
        self._found: Varlen | str = found
        self._fetch = fetch

    def why_not(self, problem: AttentionProblem) -> str | None:
        generation, found = self._generation, self._found
        reason = _limits(generation, capability(problem.device), problem.dtype, problem.head_dim)
        if reason is not None:
            return reason
        if isinstance(found, str) and self._fetch:
            self._found = found = _from_hub(generation, found)
        if isinstance(found, str):
            return f"{found}; {_remedy(generation)}"
        missing = lacks(problem, *found.can)
        if missing is not None:
            other = f"; {self._package}; {_remedy(generation)}" if self._package else ""
            return f"{missing} in {found.origin}{other}"
        newest = (capability(problem.device) or (0, 0)) >= (12, 0)
        if generation is FA4 and newest and problem.softcap and problem.train:
            return "has no softcap in training on this GPU"
        return None if found is BUILT_IN else _tried(found, problem)

    def can_capture(self, problem: AttentionProblem) -> bool:
        return self._generation is FA2

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        assert isinstance(self._found, Varlen), "refused by why_not"
        return self._found.attend(q, k, v, spec, step, sinks)


class HubAttention:
    """attn_implementation="org/repo[@revision]": a function of the hub with FlashAttention's signature."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._varlen = adapted(function, name)

    def why_not(self, problem: AttentionProblem) -> str | None:
        reason = _limits(FA2, capability(problem.device), problem.dtype, problem.head_dim)
        return reason or lacks(problem, *self._varlen.can) or _tried(self._varlen, problem)

    def can_capture(self, problem: AttentionProblem) -> bool:
        return False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: Step, sinks: Tensor | None = None
    ) -> Tensor:
        return self._varlen.attend(q, k, v, spec, step, sinks)


def _tried(found: Varlen, problem: AttentionProblem) -> str | None:
    p = problem
    return trial(found, p.device, p.dtype, p.head_dim, p.train, p.sinks, p.causal)


@lru_cache(maxsize=64)
def trial(
    found: Varlen,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    train: bool,
    sinks: bool,
    causal: bool = True,
) -> str | None:
    """Why a kernel that should serve does not: it computes a few tokens, and their gradients in training.

    What a package was built for is known to its launches alone: a missing capability is found here, not at a first
    step. Once for each function, device, dtype and head_dim.
    """
    options: dict[str, Any] = {"head_dim": head_dim, "sinks": sinks, "causal": causal}
    spec = AttentionSpec(layer=0, num_heads=2, num_kv_heads=1, scale=1.0, **options)
    make = {"dtype": dtype, "device": device, "requires_grad": train}
    q, k, v = (torch.ones(5, heads, head_dim, **make) for heads in (2, 1, 1))
    given = [q, k, v, *([torch.full((2,), -1e4, **make)] if sinks else [])]  # sinks so low take nothing
    step = full_step(torch.arange(5, device=device), (2, 3), EagerAttention())
    try:
        with torch.enable_grad():
            out = found.attend(q, k, v, spec, step, given[3] if sinks else None)
            if train:
                torch.autograd.grad(out.sum(), given)
        right = torch.allclose(out.detach().float(), torch.ones(()).to(out.device), atol=0.01)  # every value is 1
    except Exception as failure:  # whatever a foreign package raises
        first = next(iter(str(failure).splitlines()), "")
        return f"fails on this machine ({found.origin}: {type(failure).__name__}: {first})"
    return None if right else f"computes wrong values on this machine ({found.origin})"


def _limits(
    generation: Generation, on: tuple[int, int] | None, dtype: torch.dtype, head_dim: int
) -> str | None:
    """What device, dtype and head size rule out."""
    least, below = generation.least, generation.below
    if on is None or on < least:
        return f"needs an NVIDIA GPU of compute capability {_dotted(least)} or newer"
    if below is not None and on >= below:
        return f"has no kernels for compute capability {_dotted(on)}: its last is below {_dotted(below)}"
    if dtype not in HALF:
        return f"takes bfloat16 and float16, not {dtype}"
    largest = 128 if generation is FA4 and on >= (10, 0) and head_dim != 256 else 256
    if head_dim > largest or head_dim % 8:
        return f"takes a head_dim that is a multiple of 8, up to {largest}, not {head_dim}"
    return None


def _from_package(generation: Generation) -> Varlen | str:
    """The package's function, or why there is none."""
    try:
        function = import_module(generation.module).flash_attn_varlen_func
        return adapted(function, f"package {generation.module}")
    except Exception as problem:  # absent, built for another torch or CUDA, or failing in its own ways
        return f"the package {generation.module} does not import ({problem})"


def _from_hub(generation: Generation, without: str) -> Varlen | str:
    if hub_package.package_problem() is not None:
        return without
    try:
        function = hub.fetch(hub.HubReference(generation.repo))
        found = adapted(function, generation.repo)
    except ValueError as failure:
        return f"{without}, and {failure}"
    notice(f"attention: {generation.name} from {generation.repo}, because {without}", once=True)
    return found


def _remedy(generation: Generation) -> str:
    return f"install it with: {generation.pip}, or {hub_package.REMEDY} for a kernel from the hub"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
