"""The kernels of a deterministic model, in which a row's bits follow from that row and the weights alone.

Not the number of rows, nor a row's place, nor how its keys were computed (whole prompt, chunks, one by one, from the
cache), nor whether gradients are asked for changes a bit of a result. Products are the invariant ones; every attention
is `chunk_attention` with one walk over the keys; all other ops work a row at a time, in the same way for any number of
rows. Inference and training share one table: where a gradient is asked for, the values stay and the backward pass
computes the reference anew.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module

from cuformers.kernels.invariant_linear import INVARIANT_LINEAR
from cuformers.kernels.op import Choice, Implementation, Mode, Op, Problem

INFER: frozenset[Mode] = frozenset({"infer"})
BOTH: frozenset[Mode] = frozenset({"infer", "train"})
REPLACED: dict[str, tuple[str, str, frozenset[Mode]]] = {
    "linear": ("invariant_linear.triton", "invariant_linear", BOTH),
    "gated_linear": ("invariant_linear.triton", "invariant_gated_linear", BOTH),
    "rms_norm": ("invariant.rows", "rms_norm", BOTH),
    "add_rms_norm": ("invariant.rows", "add_rms_norm", BOTH),
    "rms_norm_add": ("invariant.rows", "rms_norm_add", BOTH),
    "gated_activation": ("invariant.rows", "gated_activation", BOTH),
    "logprobs": ("invariant.rows", "logprobs", BOTH),
    "rope_cache": ("invariant.rope", "rope_cache", BOTH),
    "attention_plan": ("invariant.attention", "attention_plan", INFER),
    "chunk_attention": ("invariant.attention", "chunk_attention", INFER),
    "paged_attention": ("invariant.attention", "paged_attention", INFER),
    "decode_attention": ("invariant.attention", "decode_attention", INFER),
}
"""Op -> module, function, and the modes it has of its own. The other ops stay as they are."""


def why_not(problem: Problem) -> str | None:
    """The reason why a model can't be deterministic there; None where it can."""
    reason = INVARIANT_LINEAR.implementations[0].why_not(problem)
    return reason and f"{reason}; plain PyTorch's products depend on the number of rows"


def choose(op: Op, problem: Problem) -> Choice:
    """The op's batch-invariant implementation, the same in both modes."""
    wanted, problem = problem.mode, replace(problem, mode="infer")
    if op.name not in REPLACED:
        return replace(op.choose(problem, "triton"), mode=wanted)
    module, name, modes = REPLACED[op.name]
    own = Implementation(name="invariant", load=partial(_load, module, name), modes=modes, min_capability=(8, 0))
    return replace(Op(op.name, (own, op.implementations[-1])).choose(problem, "invariant"), mode=wanted)


def _load(module: str, name: str) -> Callable:
    return getattr(import_module(f"cuformers.kernels.{module}"), name)
