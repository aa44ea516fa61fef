"""From the attention string of the user or the config to a backend that can serve the model."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature

from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.nn.attention import hub
from cuformers.nn.attention.backend import AttentionBackend, AttentionProblem
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.attention.flash import FA2, FA3, FA4, FlashAttention, HubAttention
from cuformers.nn.attention.flex import FlexAttention
from cuformers.nn.attention.over_pages import TritonAttention
from cuformers.nn.attention.registered import AttentionInterface, RegisteredAttention, registered
from cuformers.nn.attention.sdpa import SdpaAttention

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa": SdpaAttention,
    "flash_attention_2": partial(FlashAttention, FA2),
    "flash_attention_3": partial(FlashAttention, FA3),
    "flash_attention_4": partial(FlashAttention, FA4),
    "flex_attention": FlexAttention,
    "triton": TritonAttention,
    "eager": EagerAttention,
}
"""What the names stand for, without a look at the hub."""
FETCHING: dict[str, Callable[[], AttentionBackend]] = {
    generation.name: partial(FlashAttention, generation, fetch=True) for generation in (FA3, FA4)
}
"""What they stand for where a user asked for them by name."""
DEFAULTS = {"cpu": ("sdpa", "eager"), "cuda": ("sdpa", "triton", "flex_attention", "eager")}
"""Where a default is looked for, by device: the last can everything, those before it need no n x n scores."""
PAGED = "paged|"


def attention_name(asked: str | Mapping[str, str] | None) -> str | None:
    """The one name that a user means.

    Args:
        asked: a name; "paged|NAME", which is the same, as the cache of generation is always paged; {"": NAME}, as
            Transformers has it for models of several parts; or None.

    Raises:
        ValueError: none of these.
    """
    if isinstance(asked, Mapping):
        if set(asked) != {""}:
            raise bad_argument("attn_implementation", dict(asked), '{"": NAME}', "These models have one part only.")
        asked = asked[""]
    if asked is not None and not isinstance(asked, str):
        raise bad_argument("attn_implementation", asked, 'a name, {"": NAME} or None')
    return asked.removeprefix(PAGED) if asked else asked


def choose_backend(
    asked: str | Mapping[str, str] | None, problem: AttentionProblem, *, allow_all_kernels: bool = False
) -> AttentionBackend:
    """The backend to use.

    Args:
        asked: what the user asked for, see `attention_name`: a name out of `BACKENDS`, one that was registered, or a
            hub reference org/repo[@revision][:function]. None leaves the choice to us: sdpa where it can.
        problem: what the model needs.
        allow_all_kernels: a hub reference may be to a publisher that the hub does not list as trusted.

    Raises:
        ValueError: the name is unknown, or the named backend can't serve the model. An explicit choice is never
            replaced silently.
    """
    name = attention_name(asked)
    if name is None:
        return _default(problem)
    try:
        backend = _named(name, allow_all_kernels)
        reason = backend.why_not(problem)
    except ValueError as failure:  # of the hub
        backend, reason = None, str(failure)
    if backend is not None and reason is None:
        return backend
    possible = [n for n, make in BACKENDS.items() if make().why_not(problem) is None]
    raise ValueError(
        f"attn_implementation={asked!r} is not possible here: {name} {reason}. Possible here: {possible}."
    )


def _default(problem: AttentionProblem) -> AttentionBackend:
    refused: dict[str, str] = {}
    for name in DEFAULTS["cuda" if problem.device.type == "cuda" else "cpu"]:
        backend = BACKENDS[name]()
        reason = backend.why_not(problem)
        if reason is None:
            if refused:
                why = "; ".join(f"{n} {reason}" for n, reason in refused.items())
                notice(f"attention: {name}, because {why}", once=True)
            return backend
        refused[name] = reason
    raise AssertionError(f"eager serves everything, but not {problem}: {refused}")


def _named(name: str, allow_all_kernels: bool) -> AttentionBackend:
    own = registered(name)
    if own is not None:
        return own
    make = FETCHING.get(name) or BACKENDS.get(name)
    if make is not None:
        return make()
    reference = hub.parse(name)
    if reference is None:
        known = [*BACKENDS, *AttentionInterface.known]
        raise ValueError(f"is unknown: allowed is one of {known}, or a hub reference org/repo[@revision][:function]")
    function = hub.fetch(reference, allow_all_kernels=allow_all_kernels)
    if next(iter(signature(function).parameters), None) == "module":
        return RegisteredAttention(name, function)
    return HubAttention(name, function)
