"""Attention kernels from the hub, through the package `kernels`: fetched only where asked for by name."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from cuformers.kernels.hub.package import kernels_package, package_problem
from cuformers.kernels.hub.source import FAILURES, check_trust

_REFERENCE = re.compile(r"([^/:@|\s]+/[^/:@|\s]+)(?:@([^/:@|\s]+))?(?::(\w+))?")
VERSIONS = {"kernels-community/flash-attn2": 3, "kernels-community/flash-attn4": 0}
"""Version of a repository's interface; 1 for all others."""
VARLEN = "flash_attn_varlen_func"


class HubReference(NamedTuple):
    """org/repo[@revision][:function]"""

    repo: str
    revision: str | None = None
    """Branch, tag or commit; None takes the version that is known to work."""
    function: str | None = None
    """Its attention function; None means flash_attn_varlen_func."""


def parse(name: str) -> HubReference | None:
    """A hub reference; None where the name is none.

    Example:
        >>> parse("kernels-community/flash-attn2@v1:attend")
        HubReference(repo='kernels-community/flash-attn2', revision='v1', function='attend')
        >>> parse("flash_attention_2") is None
        True
    """
    match = _REFERENCE.fullmatch(name)
    return HubReference(*match.groups()) if match else None


def fetch(reference: HubReference, *, allow_all_kernels: bool = False) -> Callable[..., Any]:
    """The function that a reference names, from the hub or its cache.

    Args:
        reference: what to fetch.
        allow_all_kernels: also from publishers that the hub does not list as trusted: their code runs here.

    Raises:
        ValueError: `kernels` is missing, it refuses the repository or has no build for this machine, or the repository
            has no such function.
    """
    problem = package_problem()
    if problem is not None:
        raise ValueError(f"{reference.repo}: {problem}")
    check_trust(reference.repo, trusted=allow_all_kernels)
    which: dict[str, Any] = {"revision": reference.revision}
    if reference.revision is None:
        which = {"version": VERSIONS.get(reference.repo, 1)}
    try:
        module = kernels_package().get_kernel(reference.repo, **which, trust_remote_code=allow_all_kernels)
    except FAILURES as problem:  # no network, no build for this torch or GPU, not trusted, or its import failed
        raise ValueError(f"{reference.repo} can't be had: {type(problem).__name__}: {problem}") from problem
    function = getattr(module, reference.function or VARLEN, None)
    if not callable(function):
        has = sorted(n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n)))
        raise ValueError(f"{reference.repo} has no function {reference.function or VARLEN!r}; it has {has}.")
    return function
