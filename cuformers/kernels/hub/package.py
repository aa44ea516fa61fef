"""The package `kernels`, which fetches and imports what the hub has; optional."""

from importlib import import_module
from types import ModuleType

from cuformers.base import env

LEAST = (0, 16)
REMEDY = "pip install 'cuformers[kernels]'"
SWITCH = "USE_HUB_KERNELS"


def kernels_package() -> ModuleType:
    """The package.

    Raises:
        ImportError: it is not installed, or too old; the message has the pip line.
    """
    try:
        package = import_module("kernels")
    except ImportError as problem:
        raise ImportError(f"hub kernels need the package kernels ({problem}). {REMEDY}") from problem
    version: str | None = getattr(package, "__version__", None)
    if version is None:
        where = ", ".join(package.__path__)
        raise ImportError(f"hub kernels need the package kernels; another of that name, {where}, is found. {REMEDY}")
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST:
        raise ImportError(f"the package kernels is {version}, and 0.16 is the oldest that serves. {REMEDY}")
    return package


def package_problem() -> str | None:
    """Why hub kernels can't be had here; None where they can."""
    try:
        kernels_package()
    except ImportError as problem:
        return str(problem)
    return None if switched_on() else f"{SWITCH} is off"


def switched_on() -> bool:
    """Whether the environment allows hub kernels, as Transformers reads it."""
    return (env.get(SWITCH) or "yes").strip().upper() in ("1", "ON", "YES", "TRUE")


def is_offline() -> bool:
    """Whether huggingface_hub may not ask the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE) or env.flag("HF_HUB_OFFLINE")
