"""Which version of a hub repository a range such as ">=2.0,<3.0" means."""

import re
from collections.abc import Iterable
from pathlib import Path

from cuformers.base import env
from cuformers.base.errors import bad_argument
from cuformers.kernels.hub.package import is_offline

_VERSION = re.compile(r"v(\d+(?:\.\d+)*)")


def resolve_range(repo: str, wanted: str) -> str:
    """The branch or tag of the newest version in the range.

    Kernels name their versions v1, v2, ... (branches) or v1.2.0 (tags). Offline those count that are cached.

    Raises:
        ValueError: no range, or no version in it.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import Version

    try:
        allowed = SpecifierSet(wanted)
    except InvalidSpecifier as problem:
        raise bad_argument("kernel version", wanted, "a range such as '>=2.0,<3.0'") from problem
    found = {Version(match[1]): name for name in _refs(repo) if (match := _VERSION.fullmatch(name))}
    fitting = [version for version in found if version in allowed]
    if not fitting:
        have = ", ".join(found[v] for v in sorted(found)) or "none"
        where = "cached" if is_offline() else "published"
        raise bad_argument("kernel version", wanted, f"a range with one of the versions {where} of {repo}: {have}")
    return found[max(fitting)]


def _refs(repo: str) -> Iterable[str]:
    if is_offline():
        return _cached_refs(repo)
    from huggingface_hub import HfApi

    refs = HfApi().list_repo_refs(repo, repo_type="kernel")
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def _cached_refs(repo: str) -> list[str]:
    from huggingface_hub import constants

    cache = Path(env.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)
    folder = cache / f"kernels--{repo.replace('/', '--')}" / "refs"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
