"""What an op is: one specification (the reference) and the implementations that may stand for it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Literal

import torch

from cuformers.kernels.guard import guarded, where_tensors_are

Mode = Literal["infer", "train"]
HALF = frozenset({torch.bfloat16, torch.float16})
FLOATS = HALF | {torch.float32}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Where and how a model will run: what an implementation needs to know to say whether it can."""

    device: str
    """Device type: "cuda" or "cpu"."""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU, for example (9, 0); None on the CPU."""
    dtype: torch.dtype = torch.float32
    """Dtype of the model's activations."""
    mode: Mode = "infer"
    """"infer" never asks for gradients; "train" does."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an op, and the limits within which it is right."""

    name: str
    """"reference" or "triton"."""
    load: Callable[[], Callable]
    """Imports and returns the function; called when the implementation is chosen, not before."""
    modes: frozenset[Mode] = frozenset({"infer", "train"})
    """Modes it may be used in."""
    dtypes: frozenset[torch.dtype] = FLOATS
    """Activation dtypes it takes."""
    min_capability: tuple[int, int] | None = None
    """Least compute capability; None means that it needs no GPU."""
    captures: bool = True
    """Whether a CUDA graph can hold it: a reference may look at values on the host."""

    def why_not(self, problem: Problem) -> str | None:
        """The reason why this implementation can't serve the problem; None where it can."""
        if problem.mode not in self.modes:
            return f"has no {problem.mode} mode"
        if problem.dtype not in self.dtypes:
            return f"does not take {problem.dtype}"
        if self.min_capability is None:
            return None
        if problem.capability is None:
            return "needs an NVIDIA GPU"
        if problem.capability < self.min_capability:
            need, have = (".".join(map(str, c)) for c in (self.min_capability, problem.capability))
            return f"needs compute capability {need}, this GPU has {have}"
        return None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The implementation that was taken for one op, with the reasons against those passed over."""

    op: str
    implementation: Implementation
    refused: dict[str, str]
    function: Callable
    """The implementation's; where it has no train mode it gives way to the reference when a gradient is asked for."""
    mode: Mode
    """Mode of the model that it was chosen for."""
    why: str = ""
    """Why this one, or a part of it, was taken instead of our own best; empty where that was."""


@dataclass(frozen=True)
class Op:
    """A named operation: its implementations, best first, the reference last."""

    name: str
    implementations: tuple[Implementation, ...]

    def choose(self, problem: Problem, want: str = "auto") -> Choice:
        """Takes the best implementation that can serve the problem.

        Args:
            problem: device, dtype and mode of the model.
            want: "auto", or the name of an implementation, which is then taken or refused.

        Raises:
            ValueError: the wanted implementation is unknown or can't serve the problem.
        """
        names = [i.name for i in self.implementations]
        if want not in ("auto", *names):
            raise ValueError(f"kernels={want!r} is not possible for {self.name}: allowed is 'auto' or one of {names}.")
        refused: dict[str, str] = {}
        for candidate in self.implementations:
            if want not in ("auto", candidate.name):
                continue
            reason = candidate.why_not(problem)
            if reason is None:
                function = self._load(candidate)
                return Choice(
                    op=self.name, implementation=candidate, refused=refused, function=function, mode=problem.mode
                )
            refused[candidate.name] = reason
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        remedy = "kernels='auto' takes one that can."
        raise ValueError(f"no implementation of {self.name} serves {problem}: {reasons}. {remedy}")

    def _load(self, candidate: Implementation) -> Callable:
        function = candidate.load()
        if candidate.min_capability is not None:
            function = where_tensors_are(function)
        return function if "train" in candidate.modes else guarded(function, self.implementations[-1].load())


def two_ways(package: str, name: str, *, modes: frozenset[Mode] = frozenset({"infer"})) -> Op:
    """An op whose kernel and specification are the functions of its name in `package.triton` and `package.reference`.

    Args:
        package: folder of the op; nothing of it is imported before it is chosen.
        name: of the op.
        modes: that the kernel serves; the reference serves both.
    """
    kernel, reference = (partial(_function, f"{package}.{module}", name) for module in ("triton", "reference"))
    return Op(
        name,
        (
            Implementation(name="triton", load=kernel, modes=modes, min_capability=(8, 0)),
            Implementation(name="reference", load=reference, captures=False),
        ),
    )


def _function(module: str, name: str) -> Callable:
    return getattr(import_module(module), name)
