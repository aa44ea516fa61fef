"""How fast a device copies memory and multiplies matrices, measured: the rates that floors are computed from."""

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch

from cuformers.cuda.device import gpu_index, synchronize


class Rates(NamedTuple):
    """What a device reaches."""

    bytes_per_second: float
    """Read plus written, of a large copy on the device."""
    flops: float
    """Of a large product in a dtype, two for each multiplication with its addition."""


def measure(device: torch.device, dtype: torch.dtype) -> Rates:
    """Rates of a copy and of a square product in the dtype; half a second on a GPU."""
    on_gpu = gpu_index(device) is not None
    size, edge = (2 << 30, 8192) if on_gpu else (64 << 20, 512)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    one = torch.randn(edge, edge, device=device, dtype=torch.float32).to(dtype)
    out = torch.empty_like(one)
    copy = seconds_a_call(lambda: target.copy_(source), device)
    product = seconds_a_call(lambda: torch.matmul(one, one, out=out), device)
    return Rates(2 * size / copy, 2 * edge**3 / product)


def seconds_a_call(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Mean time of a call, after three that do not count; what it starts on the device is waited for."""
    for _ in range(3):
        work()
    synchronize(device)
    start = perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (perf_counter() - start) / repeats
