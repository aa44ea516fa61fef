"""From the attention string of the user or the config to a backend that can serve the model."""

from collections.abc import Callable

from cuformers.base.log import notice
from cuformers.nn.attention.backend import AttentionBackend, AttentionProblem
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.attention.flash2 import FlashAttention2
from cuformers.nn.attention.sdpa import SdpaAttention

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa": SdpaAttention,
    "flash_attention_2": FlashAttention2,
    "eager": EagerAttention,
}
"""In the order in which a default is looked for; eager, which can everything, is last."""


def choose_backend(name: str | None, problem: AttentionProblem) -> AttentionBackend:
    """The backend to use.

    Args:
        name: what the user asked for; None leaves the choice to us: sdpa where it can, else eager.
        problem: what the model needs.

    Raises:
        ValueError: the name is unknown, or the named backend can't serve the model. An explicit choice is never
            replaced silently.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"attn_implementation={name!r} is unknown: allowed is one of {list(BACKENDS)}.")
    refused: dict[str, str] = {}
    for candidate in [name] if name is not None else [n for n in BACKENDS if n != "flash_attention_2"]:
        backend = BACKENDS[candidate]()
        reason = backend.why_not(problem)
        if reason is None:
            if refused:
                notice(f"attention: {candidate}, because " + "; ".join(f"{n} {why}" for n, why in refused.items()))
            return backend
        refused[candidate] = reason
    possible = [n for n, make in BACKENDS.items() if make().why_not(problem) is None]
    why = "; ".join(f"{n} {reason}" for n, reason in refused.items())
    raise ValueError(f"attn_implementation={name!r} is not possible here: {why}. Possible here: {possible}.")
