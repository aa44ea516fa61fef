"""Where a hub layer comes from, and how its class is loaded."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol, runtime_checkable

from torch import nn

from cuformers.base.errors import bad_argument
from cuformers.kernels.hub.package import is_offline, kernels_package
from cuformers.kernels.hub.versions import resolve_range

TRUSTED = ("kernels-community",)
"""Publishers known to be trusted where the hub can't be asked; online the package `kernels` asks it."""
FAILURES = (FileNotFoundError, OSError, ValueError, RuntimeError, AttributeError, TypeError, ImportError)
"""What fetching or importing somebody's package raises."""
_REPO = re.compile(r"[\w.-]+/[\w.-]+")


@runtime_checkable
class LayerSource(Protocol):
    """What yields a layer's class: a Source, or a LayerRepository of the package `kernels`."""

    @property
    def layer_name(self) -> str: ...

    def load(self) -> type[nn.Module]: ...


@dataclass(frozen=True, kw_only=True)
class Source:
    """A layer of a hub repository or of a local folder."""

    repo: str
    """"org/name", or the folder's path."""
    layer_name: str
    """Name of the class in the kernel's `layers`."""
    version: int | None = None
    """Major version, a branch v1, v2, ...; one of version, revision and range is set for the hub."""
    revision: str | None = None
    """Branch, tag or commit."""
    range: str | None = None
    """Versions that will do, such as ">=2.0,<3.0"; the newest is taken."""
    trust_remote_code: bool = False
    """Whether the publisher need not be one that the hub trusts."""
    local: bool = False
    """Whether repo is a folder."""

    def __str__(self) -> str:
        if self.local:
            return f"{self.repo}:{self.layer_name}"
        return f"{self.repo}@{self.revision or self.range or f'v{self.version}'}:{self.layer_name}"

    def load(self) -> type[nn.Module]:
        """The layer's class; fetches the kernel where it is not cached.

        Raises:
            ImportError: the package `kernels` is missing.
            ValueError: not trusted, not there, no build for this machine, or without such a layer.
        """
        package = kernels_package()
        if not self.local:
            check_trust(self.repo, trusted=self.trust_remote_code)
        try:
            layers = self._kernel(package).layers
        except FAILURES as problem:
            remedy = "Name another version, or leave the layer to our own kernels."
            raise ValueError(f"hub kernel {self} can't be loaded: {problem}. {remedy}") from problem
        if not hasattr(layers, self.layer_name):
            names = sorted(name for name, value in vars(layers).items() if isinstance(value, type))
            raise bad_argument("kernel layer", self.layer_name, f"one of {names}", f"That is what {self.repo} has.")
        return getattr(layers, self.layer_name)

    def _kernel(self, package: ModuleType) -> ModuleType:
        if self.local:
            return package.get_local_kernel(Path(self.repo))
        if self.range is not None:
            at: dict[str, str | int | None] = {"revision": resolve_range(self.repo, self.range)}
        else:
            at = {"revision": self.revision, "version": self.version}
        return package.get_kernel(self.repo, **at, trust_remote_code=self.trust_remote_code)


def check_trust(repo: str, *, trusted: bool) -> None:
    """Online the package asks the hub about the publisher; offline nobody can, and being cached proves nothing.

    Raises:
        ValueError: offline, a publisher that is not known to be trusted, without permission.
    """
    if trusted or not is_offline() or repo.split("/")[0] in TRUSTED:
        return
    raise ValueError(
        f"hub kernel {repo} is code of a publisher of whom the hub can't be asked offline. To run it nevertheless, "
        "say 'trust_remote_code': True in a mapping's metadata, or allow_all_kernels=True."
    )


def local_source(text: str) -> Source:
    """From "/folder:Layer".

    Raises:
        ValueError: another form, or no such folder.
    """
    folder, separator, layer = text.rpartition(":")
    if not separator or not folder or not layer:
        raise bad_argument("kernel", text, "'/folder:LayerName', as use_local_kernel=True")
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise bad_argument("kernel", text, "the folder of a kernel", f"There is no folder {path}.")
    return Source(repo=str(path), layer_name=layer, local=True)


def hub_source(text: str, *, version: int | None = None, revision: str | None = None, trust: bool = False) -> Source:
    """From "org/repo:Layer", "org/repo@revision:Layer" or "org/repo@>=2.0,<3.0:Layer"; by default version 1.

    Raises:
        ValueError: another form.
    """
    where, separator, layer = text.partition(":")
    repo, at, wanted = where.partition("@")
    if not separator or not layer or not _REPO.fullmatch(repo) or (at and not wanted):
        remedy = "A folder needs use_local_kernel=True." if Path(where).is_absolute() else ""
        raise bad_argument("kernel", text, "'org/repo:LayerName'", remedy)
    if wanted and (version is not None or revision is not None):
        raise bad_argument("kernel", text, "one of '@...', 'version' and 'revision'")
    span = wanted if wanted[:1] in (">", "<", "=", "!", "~") else None
    revision = (wanted or revision) if span is None else None
    if revision is None and span is None and version is None:
        version = 1
    return Source(
        repo=repo, layer_name=layer, version=version, revision=revision, range=span, trust_remote_code=trust
    )
