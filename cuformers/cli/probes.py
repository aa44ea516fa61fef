"""What `cuformers env` asks of the upper rooms: which packages, attention backends and kernels work here."""

import platform
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch as torch_package

from cuformers.base.version import VERSION
from cuformers.cuda.report import OpChoice, Usable
from cuformers.cuda.runtime import SDPA_KERNELS, Torch, sdpa_problem
from cuformers.kernels.hub.package import package_problem as hub_problem
from cuformers.kernels.op import Mode, Op, Problem
from cuformers.kernels.table import OPS
from cuformers.nn.attention.backend import AttentionProblem
from cuformers.nn.attention.choose import BACKENDS
from cuformers.nn.attention.flash import package_problem

PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "rich",
    "flash_attn", "flash-attn-4", "kernels",
)  # fmt: skip
HARDER = {
    "softcap": {"softcap": True},
    "sinks": {"sinks": True},
    "head_dim 256": {"head_dim": 256},
    "training": {"train": True},
}
"""What some models ask beyond the plain case, for the remarks on backends that are usable otherwise."""


def versions() -> dict[str, str | None]:
    """Versions of what decides behaviour; None for what is not installed."""
    found: dict[str, str | None] = {"cuformers": VERSION, "python": platform.python_version()}
    found["platform"] = platform.platform()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def packages() -> list[Usable]:
    """Triton with what it compiles by, and the optional flash_attn and kernels."""
    flash = package_problem()
    built_in = f"{flash}; flash_attention_2 uses torch's built-in copy"
    return [
        _usable("triton", triton_problem()),
        Usable(name="flash_attn", usable=flash is None, why=built_in if flash else ""),
        _usable("kernels", hub_problem()),
    ]


def triton_problem(find: Callable[[str], str | None] = shutil.which, headers: str | None = None) -> str | None:
    """Why Triton can't build and start kernels; None where nothing is missing.

    Args:
        find: finds a program on the PATH.
        headers: folder of Python's C headers; this Python's where not given.
    """
    try:
        import triton  # noqa: F401
    except ImportError as problem:
        return f"does not import ({problem}); install it with: pip install triton"
    if not (find("gcc") or find("clang")):
        return "finds no C compiler, which builds its launchers; install gcc"
    folder = headers or sysconfig.get_paths()["include"]
    if not (Path(folder) / "Python.h").exists():
        return f"finds no Python.h in {folder}; install Python's headers (python3-dev)"
    return None


def attention(torch: Torch) -> list[Usable]:
    """Every name that `attn_implementation` takes, and the kernels of sdpa, on the device that models would use."""
    device, dtype = usual_place(torch)
    plain = AttentionProblem(device=device, dtype=dtype, head_dim=128, softcap=False, window=False)
    rows = []
    for name in BACKENDS:
        rows.append(_backend(name, plain))
        if name == "sdpa":
            rows += [_usable(f"sdpa: {kernel}", _kernel_problem(kernel, device, dtype)) for kernel in SDPA_KERNELS]
    return rows


def kernels(torch: Torch) -> list[OpChoice]:
    """What computes each op in each mode on the device that models would use."""
    device, dtype = usual_place(torch)
    capability = torch.gpus[0].capability if device.type == "cuda" else None
    return [_op(op, Problem(device=device.type, capability=capability, dtype=dtype)) for op in OPS]


def _op(op: Op, problem: Problem) -> OpChoice:
    modes: tuple[Mode, Mode] = ("infer", "train")
    infer, train = (op.choose(replace(problem, mode=mode)) for mode in modes)
    reasons = [
        f"{mode}: {name} {reason}"
        for mode, choice in zip(modes, (infer, train))
        for name, reason in choice.refused.items()
    ]
    return OpChoice(
        op=op.name, infer=infer.implementation.name, train=train.implementation.name, passed_over="; ".join(reasons)
    )


def usual_place(torch: Torch) -> tuple[torch_package.device, torch_package.dtype]:
    """The device that models use by default, and the dtype they mostly have there."""
    if not torch.gpus or torch.gpus[0].problem:
        return torch_package.device("cpu"), torch_package.float32
    half = torch_package.bfloat16 if torch.gpus[0].capability >= (8, 0) else torch_package.float16
    return torch_package.device("cuda", 0), half


def _backend(name: str, plain: AttentionProblem) -> Usable:
    backend = BACKENDS[name]()
    reason = backend.why_not(plain)
    if reason is not None:
        return Usable(name=name, usable=False, why=reason)
    harder = {what: backend.why_not(replace(plain, **change)) for what, change in HARDER.items()}
    return Usable(
        name=name, usable=True, why="; ".join(f"not with {what}: {why}" for what, why in harder.items() if why)
    )


def _kernel_problem(kernel: str, device: torch_package.device, dtype: torch_package.dtype) -> str | None:
    if device.type == "cpu" and kernel in ("cudnn", "efficient"):
        return "needs an NVIDIA GPU"
    return sdpa_problem(kernel, device, dtype)


def _usable(name: str, problem: str | None) -> Usable:
    return Usable(name=name, usable=problem is None, why=problem or "")
