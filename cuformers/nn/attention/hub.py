"""Attention kernels from the hub, through the package `kernels`: fetched only where asked for by name."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from cuformers.kernels.hub.package import package_problem
from cuformers.kernels.hub.source import Source

PIP = "pip install 'cuformers[kernels]'"
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
        ValueError: hub kernels can't be had here, the publisher is not trusted, there is no build for this machine, or
            no such function.
    """
    problem = package_problem()
    if problem is not None:
        raise ValueError(f"comes from the hub, but {problem}; {PIP}")
    name, revision = reference.function or VARLEN, reference.revision
    version = VERSIONS.get(reference.repo, 1) if revision is None else None
    source = Source(
        repo=reference.repo, layer_name=name, version=version, revision=revision, trust_remote_code=allow_all_kernels
    )
    module = source.kernel()
    function = getattr(module, name, None)
    if not callable(function):
        has = sorted(n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n)))
        raise ValueError(f"{reference.repo} has no function {name!r}; it has {has}.")
    return function
