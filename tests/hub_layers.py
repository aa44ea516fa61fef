"""Kernels of the Kernel Hub's layout in a folder, and a stand-in for the package `kernels` where it is not installed.

The layers are plain torch, some of them wrong on purpose; each notes its calls in `layers.CALLS`. The stand-in has the
few names that are used, with the package's signatures, and imports the very same folders.
"""

import importlib.util
import json
import sys
from dataclasses import dataclass
from enum import Flag, auto
from functools import cache
from hashlib import sha1
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.paths import ROOT

LAYERS = '''
import torch
from torch import nn

CALLS = []


def normed(module, x):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * h.to(x.dtype)


class Norm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states):
        CALLS.append(("Norm", tuple(hidden_states.shape), self.training))
        return normed(self, hidden_states)


LigerRMSNorm = Norm


class InferenceNorm(nn.Module):
    has_backward = False

    def forward(self, hidden_states):
        CALLS.append(("InferenceNorm", tuple(hidden_states.shape), self.training))
        return normed(self, hidden_states).detach()


class SilentNorm(nn.Module):
    """Does not say that it has no backward pass."""

    def forward(self, hidden_states):
        return normed(self, hidden_states).detach()


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.1


class WrongBackwardNorm(nn.Module):
    def forward(self, hidden_states):
        return _WrongGradient.apply(normed(self, hidden_states))


class _InPlace(torch.autograd.Function):
    """Writes its input's gradient over its output's, as LigerRMSNorm does."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return normed(type("Module", (), {"weight": weight, "variance_epsilon": eps}), x)

    @staticmethod
    def backward(ctx, grad):
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = normed(type("Module", (), {"weight": weight, "variance_epsilon": ctx.eps}), x)
        dx, dw = torch.autograd.grad(y, (x, weight), grad)
        return grad.copy_(dx), dw, None


class InPlaceBackwardNorm(nn.Module):
    def forward(self, hidden_states):
        return _InPlace.apply(hidden_states, self.weight, self.variance_epsilon)


class WrongNorm(nn.Module):
    def forward(self, hidden_states):
        return normed(self, hidden_states) * 1.01


class NanNorm(nn.Module):
    def forward(self, hidden_states):
        return normed(self, hidden_states) * float("nan")


class WideNorm(nn.Module):
    def forward(self, hidden_states):
        return normed(self, hidden_states).double()


class FlatNorm(nn.Module):
    def forward(self, hidden_states):
        return normed(self, hidden_states).flatten()


class WritingNorm(nn.Module):
    def forward(self, hidden_states):
        return hidden_states.copy_(normed(self, hidden_states))


class CrashingNorm(nn.Module):
    def forward(self, hidden_states):
        raise RuntimeError("no kernel image is available for execution on the device")


class StatefulNorm(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, hidden_states):
        return hidden_states


class TwoTensorNorm(nn.Module):
    def forward(self, hidden_states, residual):
        return hidden_states + residual


def no_class(hidden_states):
    return hidden_states


class Silu(nn.Module):
    can_torch_compile = True

    def forward(self, x):
        CALLS.append(("Silu", tuple(x.shape), self.training))
        assert x.is_contiguous()
        return nn.functional.silu(x)


class Gelu(nn.Module):
    def forward(self, x):
        CALLS.append(("Gelu", tuple(x.shape), self.training))
        return nn.functional.gelu(x)


class GeluTanh(nn.Module):
    def forward(self, x):
        CALLS.append(("GeluTanh", tuple(x.shape), self.training))
        return nn.functional.gelu(x, approximate="tanh")


class SiluAndMul(nn.Module):
    def forward(self, x):
        CALLS.append(("SiluAndMul", tuple(x.shape), self.training))
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


def half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class Rotary(nn.Module):
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        CALLS.append(("Rotary", tuple(q.shape), self.training))
        assert cos.dtype == q.dtype
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + half(q) * sin, k * cos + half(k) * sin


class BackwardsRotary(nn.Module):
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos - half(q) * sin, k * cos - half(k) * sin
'''


def write_kernel(folder: Path, layers: str = LAYERS) -> Path:
    """Writes a kernel with builds for torch on the CPU and with CUDA; its folder."""
    for backend in ("cpu", "cuda"):
        build = folder / "build" / f"torch-{backend}"
        build.mkdir(parents=True)
        (build / "__init__.py").write_text("from . import layers\n")
        (build / "layers.py").write_text(layers)
        name = f"_test_{sha1(str(build).encode()).hexdigest()[:8]}_{backend}_1"
        about = {"id": name, "name": "test", "version": 1, "license": "MIT", "python-depends": []}
        (build / "metadata.json").write_text(json.dumps({**about, "backend": {"type": backend}}))
    return folder


def publish(cache: Path, repo: str, *versions: str) -> None:
    """Puts a kernel into a huggingface_hub cache as the branches or tags `versions`."""
    entry = cache / f"kernels--{repo.replace('/', '--')}"
    (entry / "refs").mkdir(parents=True)
    for number, name in enumerate(versions):
        commit = f"{number:040x}"
        (entry / "refs" / name).write_text(commit)
        write_kernel(entry / "snapshots" / commit, f"{LAYERS}\nVERSION = {name!r}\n")


class Mode(Flag):
    """As the package's."""

    FALLBACK = auto()
    TRAINING = auto()
    INFERENCE = auto()
    TORCH_COMPILE = auto()


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """As the package's CUDAProperties."""

    min_capability: int
    max_capability: int


@dataclass(frozen=True)
class Device:
    """As the package's."""

    type: str
    properties: Bounds | None = None


@dataclass(frozen=True, kw_only=True)
class LayerRepository:
    """As the package's, without a hub behind it."""

    repo_id: str
    layer_name: str
    version: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class LocalLayerRepository:
    """As the package's."""

    repo_path: Path
    layer_name: str

    def load(self) -> type:
        return getattr(_import(self.repo_path).layers, self.layer_name)


def _import(folder: Path) -> Any:
    build = folder / "build" / "torch-cpu"
    if not build.is_dir():
        raise FileNotFoundError(f"Cannot find a build variant for this system in {folder}")
    name = json.loads((build / "metadata.json").read_text())["id"]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, build / "__init__.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _from_cache(
    repo_id: str, *, revision: str | None = None, version: int | None = None, trust_remote_code: bool = False
) -> Any:
    from huggingface_hub import constants

    entry = Path(constants.HF_HUB_CACHE) / f"kernels--{repo_id.replace('/', '--')}"
    ref = entry / "refs" / (f"v{version}" if revision is None else revision)
    if not ref.is_file():
        raise ValueError(f"{ref.name} of {repo_id!r} is not available in the local cache")
    return _import(entry / "snapshots" / ref.read_text())


def stand_in(number: str = "0.17.2") -> ModuleType:
    """A module like the package `kernels`, offline."""
    package: Any = ModuleType("kernels")
    package.__version__ = number
    package.get_kernel, package.get_local_kernel = _from_cache, _import
    package.Mode, package.Device, package.CUDAProperties = Mode, Device, Bounds
    package.LayerRepository, package.LocalLayerRepository = LayerRepository, LocalLayerRepository
    return package


def install(patch: pytest.MonkeyPatch, which: str) -> Any:
    """Makes `import kernels` give the stand-in, or the package itself where it is installed."""
    package = _installed() if which == "installed" else stand_in()
    patch.setitem(sys.modules, "kernels", package)
    return package


@cache
def _installed() -> Any:
    """The package itself, which pytest hides: it puts tests/ on the path, where a folder has the same name."""
    try:
        version("kernels")
    except PackageNotFoundError:
        pytest.skip("the package kernels is not installed")
    hidden = {name: m for name, m in sys.modules.items() if name == "kernels" or name.startswith("kernels.")}
    path = list(sys.path)
    sys.path[:] = [p for p in path if Path(p).resolve() != ROOT / "tests"]
    for name in hidden:
        del sys.modules[name]
    try:
        return import_module("kernels")
    finally:
        sys.path[:] = path
        sys.modules.pop("kernels", None)
        sys.modules.update(hidden)


PACKAGES = ["stand-in", "installed"]


def calls(folder: Path) -> list[tuple[str, tuple[int, ...], bool]]:
    """The calls of the layers of a folder, in all builds of it, which this forgets."""
    found: list[tuple[str, tuple[int, ...], bool]] = []
    for build in sorted((folder / "build").iterdir()):
        module = sys.modules.get(json.loads((build / "metadata.json").read_text())["id"])
        if module is not None:
            found += module.layers.CALLS
            module.layers.CALLS.clear()
    return found
