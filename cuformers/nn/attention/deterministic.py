"""Attention of a deterministic model: a plain forward gets the bits that the engine's steps give."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.cuda.device import capability
from cuformers.nn.attention.backend import AttentionProblem
from cuformers.nn.attention.choose import choose_backend
from cuformers.nn.attention.over_pages import AttentionOverPages

NAME = "deterministic"


class DeterministicAttention(AttentionOverPages):
    """The op `chunk_attention` of a deterministic table, on pages; the backward pass is another backend's."""

    name = NAME

    def why_not(self, problem: AttentionProblem) -> str | None:
        if problem.head_dim > 128 and (capability(problem.device) or (0, 0)) >= (12, 0):
            return f"takes a head_dim up to 128 on this GPU, not {problem.head_dim}"  # sums are not rounded in one way
        return super().why_not(problem)


def deterministic_backend(
    name: str | None, problem: AttentionProblem, chunk_attention: Callable[..., Tensor]
) -> DeterministicAttention:
    """The attention backend of a deterministic model.

    Args:
        name: what the user asked for; None or "deterministic".
        problem: what the model needs.
        chunk_attention: of the model's table.

    Raises:
        ValueError: another backend was asked for, whose bits depend on the batch; or the model has a head_dim that the
            kernel does not take.
    """
    remedy = "Leave it out, or call model.set_deterministic(False) first."
    if name not in (None, NAME):
        reason = f"{NAME!r} or None in a deterministic model (a row's bits from {name!r} depend on the other rows)"
        raise bad_argument("attn_implementation", name, reason, remedy)
    backend = DeterministicAttention(chunk_attention, choose_backend(None, replace(problem, train=True)))
    reason = backend.why_not(problem)
    if reason is not None:
        raise bad_argument("deterministic", True, f"False for this model (attention {reason})")
    return backend
