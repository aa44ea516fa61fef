"""Where hub layers come from: folders, the cache, versions, trust, and what is said when they can't be had."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuformers.base import env
from cuformers.kernels.hub.package import kernels_package, package_problem
from cuformers.kernels.hub.source import hub_source, local_source
from cuformers.kernels.hub.versions import resolve_range
from tests.hub_cache import offline
from tests.hub_layers import PACKAGES, install, publish, stand_in, write_kernel

REPO = "kernels-community/norms"


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch, request.param)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline cache with three versions of one kernel."""
    offline(monkeypatch, tmp_path)
    publish(tmp_path, REPO, "v1", "v2", "v10", "v2.1.0", "main")
    return tmp_path


def version_of(cls: type) -> str:
    return sys.modules[cls.__module__].VERSION


def test_a_folder(tmp_path: Path, package: Any) -> None:
    cls = local_source(f"{write_kernel(tmp_path / 'kernel')}:Norm").load()
    assert cls.__name__ == "Norm" and "variance_epsilon" in cls.__annotations__


@pytest.mark.parametrize(
    ("text", "metadata", "version"),
    [
        (f"{REPO}:Norm", {}, "v1"),
        (f"{REPO}:Norm", {"version": 2}, "v2"),
        (f"{REPO}:Norm", {"revision": "main"}, "main"),
        (f"{REPO}@v2.1.0:Norm", {}, "v2.1.0"),
        (f"{REPO}@>=2.0,<3.0:Norm", {}, "v2.1.0"),
        (f"{REPO}@>=2:Norm", {}, "v10"),
        (f"{REPO}@<2:Norm", {}, "v1"),
    ],
)
def test_versions_from_the_cache(
    text: str, metadata: dict[str, Any], version: str, cache: Path, monkeypatch: pytest.MonkeyPatch, package: Any
) -> None:
    for module in [name for name in sys.modules if name.startswith("_test_")]:
        monkeypatch.delitem(sys.modules, module)
    assert version_of(hub_source(text, **metadata).load()) == version


def test_a_range_without_a_version_names_those_there_are(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"'>=11' is not possible.*cached of .*: v1, v2, v2\.1\.0, v10"):
        resolve_range(REPO, ">=11")
    with pytest.raises(ValueError, match="cached of org/none: none"):
        resolve_range("org/none", ">=1")
    with pytest.raises(ValueError, match="a range such as"):
        resolve_range(REPO, ">>1")


def test_a_range_asks_the_hub_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    branches, tags = (
        [SimpleNamespace(name=name) for name in names] for names in (("main", "v1", "v3"), ("v3.2.0", "nightly"))
    )
    asked = []

    def refs(self: object, repo: str, *, repo_type: str) -> SimpleNamespace:
        asked.append((repo, repo_type))
        return SimpleNamespace(branches=branches, tags=tags)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_refs", refs)
    assert resolve_range(REPO, ">=1,<4") == "v3.2.0" and asked == [(REPO, "kernel")]


def test_the_packages_own_cache_counts(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "own", "org/other", "v5")
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "own"))
    assert env.get("KERNELS_CACHE") and resolve_range("org/other", ">=1") == "v5"


def test_offline_only_known_publishers_are_trusted(cache: Path, package: Any) -> None:
    publish(cache, "somebody/norms", "v1")
    with pytest.raises(ValueError, match=r"somebody/norms is code of a publisher.*allow_all_kernels=True"):
        hub_source("somebody/norms:Norm").load()
    assert hub_source("somebody/norms:Norm", trust=True).load().__name__ == "Norm"
    assert hub_source(f"{REPO}:Norm").load().__name__ == "Norm"


def test_what_is_not_there_is_said(cache: Path, tmp_path: Path, package: Any) -> None:
    with pytest.raises(ValueError, match=r"kernels-community/norms@v7:Norm can't be loaded: .*v?7"):
        hub_source(f"{REPO}:Norm", version=7).load()
    with pytest.raises(ValueError, match=r"'Normal' is not possible: allowed is one of \[.*'InferenceNorm'.*'Norm'"):
        hub_source(f"{REPO}:Normal").load()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty:Norm can't be loaded: (Cannot find a build variant|Failed to open)"):
        local_source(f"{tmp_path / 'empty'}:Norm").load()


@pytest.mark.parametrize("code", ["import no_such_package_at_all", "raise RuntimeError('built for torch 2.3')"])
def test_a_kernel_that_does_not_import(code: str, tmp_path: Path, package: Any) -> None:
    folder = write_kernel(tmp_path / "kernel", code)
    with pytest.raises(ValueError, match=r"kernel:Norm can't be loaded: (No module named|built for torch 2\.3)"):
        local_source(f"{folder}:Norm").load()


def test_the_package_is_missing_or_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = local_source(f"{write_kernel(tmp_path / 'kernel')}:Norm")
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ImportError, match=r"hub kernels need the package kernels.*pip install 'cuformers\[kernels\]'"):
        source.load()
    monkeypatch.setitem(sys.modules, "kernels", stand_in("0.15.2"))
    with pytest.raises(ImportError, match=r"kernels is 0\.15\.2, and 0\.16 is the oldest.*pip install"):
        source.load()


def test_another_package_of_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As tests/kernels is under pytest, or a folder where a user works."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    with pytest.raises(ImportError, match=rf"another of that name, {tmp_path}/kernels, is found"):
        kernels_package()


def test_env_says_whether_it_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuformers.cli import probes

    def row() -> tuple[bool, str]:
        (found,) = (usable for usable in probes.packages() if usable.name == "kernels")
        return found.usable, found.why

    monkeypatch.setitem(sys.modules, "kernels", None)
    usable, why = row()
    assert not usable and why.endswith("pip install 'cuformers[kernels]'") and "kernels" in probes.versions()
    monkeypatch.setitem(sys.modules, "kernels", stand_in())
    assert row() == (True, "")
    monkeypatch.setenv("USE_HUB_KERNELS", "no")
    assert row() == (False, "USE_HUB_KERNELS is off") and package_problem() == "USE_HUB_KERNELS is off"
