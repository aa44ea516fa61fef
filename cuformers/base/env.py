"""Every environment variable that cuformers reads, in one table. No other file touches `os.environ`."""

import os
from typing import NamedTuple


class Variable(NamedTuple):
    """One environment variable: its name, who defines it, and what it does here."""

    name: str
    meaning: str


VARIABLES = (
    Variable("CUDA_VISIBLE_DEVICES", "which GPUs this process sees, and in which order (NVIDIA)"),
    Variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID (our default, nvidia-smi's order) or FASTEST_FIRST (NVIDIA)"),
    Variable("HF_HOME", "where huggingface_hub keeps its cache (huggingface_hub)"),
    Variable("HF_HUB_OFFLINE", "1: never ask the hub, use what is cached (huggingface_hub)"),
    Variable("HF_TOKEN", "token for gated or private hub repositories (huggingface_hub)"),
    Variable("USE_HUB_KERNELS", "0: no layer comes from the Kernel Hub (Transformers)"),
    Variable("KERNELS_CACHE", "where the package kernels keeps its cache; by default huggingface_hub's (kernels)"),
    Variable("LOCAL_RANK", "set by torchrun: which GPU this process should use"),
    Variable("WORLD_SIZE", "set by torchrun: how many processes it started"),
    Variable("CUFORMERS_QUIET", "1: no notices on stderr"),
    Variable("CUFORMERS_NO_PROGRESS", "1: no progress bars"),
    Variable("TRITON_INTERPRET", "1: kernels run in Triton's CPU interpreter (read when they are imported)"),
)
_NAMES = frozenset(v.name for v in VARIABLES)


def get(name: str, default: str | None = None) -> str | None:
    """The value of a variable of the table, or `default` where it is unset."""
    assert name in _NAMES, f"{name} is missing from base/env.py's table"
    return os.environ.get(name, default)


def put(name: str, value: str) -> None:
    """Sets a variable of the table for this process (device selection, before CUDA starts)."""
    assert name in _NAMES, f"{name} is missing from base/env.py's table"
    os.environ[name] = value


def flag(name: str) -> bool:
    """True where the variable is set to something other than empty, 0, false, no or off."""
    return (get(name) or "").strip().lower() not in ("", "0", "false", "no", "off")
