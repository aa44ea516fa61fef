"""Which device to use, and the two facts about it that kernels are chosen by."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from cuformers.base import env
from cuformers.base.errors import bad_argument

ALLOWED = "'cpu', 'cuda', 'cuda:N', the number N of a visible GPU, or a torch.device of these"


def device_count() -> int:
    """Number of GPUs that this process can use; 0 where torch can't use any (see `cuformers env` for why)."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def default_device() -> torch.device:
    """The GPU of this process (`cuda:LOCAL_RANK` under a launcher, else `cuda:0`); the CPU where there is no GPU.

    Raises:
        ValueError: the launcher started more processes than there are visible GPUs.
    """
    return _gpu_of_process() if device_count() else torch.device("cpu")


def resolve_device(spec: str | int | torch.device) -> torch.device:
    """The device that a user's word for it means; a GPU always comes back with its index.

    Args:
        spec: "cpu", "cuda" (this process's GPU), "cuda:1", 1, or a torch.device.

    Raises:
        ValueError: not one of these, or not among the visible devices, which the message names.
    """
    device = _parse(spec)
    if device.type == "cpu":
        return torch.device("cpu")
    count = device_count()
    if count == 0:
        remedy = "torch sees no GPU here: use device='cpu', or run `cuformers env`, which says why."
        raise bad_argument("device", spec, "'cpu'", remedy)
    if device.index is None:
        return _gpu_of_process()
    if device.index >= count:
        raise bad_argument("device", spec, f"one of {visible_names()}", "CUDA_VISIBLE_DEVICES decides what is visible.")
    return device


def visible_names() -> list[str]:
    """The devices that `resolve_device` takes on this machine: ["cpu", "cuda:0", ...]."""
    return ["cpu", *(f"cuda:{i}" for i in range(device_count()))]


def capability(device: torch.device | str | int) -> tuple[int, int] | None:
    """Compute capability of a GPU, for example (9, 0) on an H200; None for the CPU. Cached."""
    index = gpu_index(device)
    return None if index is None else _capability(index)


def num_sms(device: torch.device | str | int) -> int:
    """Number of streaming multiprocessors of a GPU (132 on an H200); 0 for the CPU. Cached."""
    index = gpu_index(device)
    return 0 if index is None else _properties(index).multi_processor_count


def device_name(device: torch.device | str | int) -> str:
    """The product's name, for example "NVIDIA H200"; "CPU" for the CPU."""
    index = gpu_index(device)
    return "CPU" if index is None else _properties(index).name


def synchronize(device: torch.device | str | int) -> None:
    """Waits until the device has finished all its work; nothing to wait for on the CPU."""
    index = gpu_index(device)
    if index is not None:
        torch.cuda.synchronize(index)


def on(device: torch.device | str | int) -> AbstractContextManager:
    """While entered, what names no device goes to this one: Triton's launches, events, streams asked for by nobody."""
    index = gpu_index(device)
    return nullcontext() if index is None else torch.cuda.device(index)


def gpu_index(device: torch.device | str | int) -> int | None:
    """Index of a GPU among the visible ones (the current one for a bare "cuda"); None for every other device."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _parse(spec: str | int | torch.device) -> torch.device:
    if isinstance(spec, bool) or not isinstance(spec, str | int | torch.device):
        raise bad_argument("device", spec, ALLOWED)
    text = str(spec).strip()
    if text.isdecimal():
        text = f"cuda:{text}"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise bad_argument("device", spec, ALLOWED) from None
    if device.type not in ("cpu", "cuda"):
        raise bad_argument("device", spec, ALLOWED, "cuformers runs on NVIDIA GPUs and on the CPU.")
    return device


def _gpu_of_process() -> torch.device:
    text = env.get("LOCAL_RANK") or "0"
    if not text.isdecimal():
        raise bad_argument("LOCAL_RANK", text, "a number from 0", "torchrun sets it; unset it outside a launcher.")
    rank, count = int(text), device_count()
    if rank >= count:
        remedy = f"Start at most {count} processes on this machine, or make more GPUs visible."
        raise bad_argument("LOCAL_RANK", rank, f"0 to {count - 1}, as {count} GPU(s) are visible", remedy)
    return torch.device("cuda", rank)


@cache
def _capability(index: int) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


@cache
def _properties(index: int):
    return torch.cuda.get_device_properties(index)
