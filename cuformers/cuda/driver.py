"""What the NVIDIA driver says about this machine, asked without CUDA and without torch."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from cuformers.cuda.nvml import DRIVER_NOT_LOADED, LIBRARY_MISMATCH, Nvml, NvmlError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MigInstance:
    """A slice of a GPU in MIG mode, which CUDA shows as a GPU of its own."""

    name: str
    """For example "NVIDIA H200 MIG 1g.18gb"."""
    uuid: str
    """ "MIG-..."."""
    total_bytes: int | None
    """Memory of the slice."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A physical GPU."""

    index: int
    """nvidia-smi's number: the place in PCI order."""
    name: str
    """Product name."""
    uuid: str
    """ "GPU-..."."""
    pci_bus_id: str = ""
    """domain:bus:device.function."""
    capability: tuple[int, int] | None = None
    """Compute capability."""
    total_bytes: int | None = None
    """Memory; None where the GPU shares the host's."""
    used_bytes: int | None = None
    """Memory in use by all processes and the driver."""
    mig: bool = False
    """Whether MIG mode is on."""
    instances: tuple[MigInstance, ...] = ()
    """Its MIG instances."""
    nvlinks: int = 0
    """NVLink lanes that are up."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The way between two GPUs, the same in both directions."""

    source: int
    """nvidia-smi index, the lower one."""
    target: int
    """nvidia-smi index, the higher one."""
    path: str
    """ "NVLink", or PIX, PXB, PHB, NODE, SYS as in `nvidia-smi topo -m`."""
    p2p: str
    """ "ok", or why they can't read each other's memory."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The driver and the GPUs it shows to this user."""

    version: str | None = None
    """For example "580.95.05"; None without a driver."""
    cuda: tuple[int, int] | None = None
    """The newest CUDA it runs."""
    gpus: tuple[Gpu, ...] = ()
    """In PCI order."""
    links: tuple[Link, ...] = ()
    """Every pair of GPUs."""
    problem: str | None = None
    """Why the driver could not be asked."""
    remedy: str | None = None
    """What to do about the problem."""
    on_bus: int = 0
    """NVIDIA GPUs on the PCI bus, whether or not a driver runs them."""


def read(library: Any = None, pci_root: str | Path = "/sys/bus/pci/devices") -> Driver:
    """Asks the driver. A machine without one is an answer, not an error.

    Args:
        library: stands for libnvidia-ml in tests.
        pci_root: where the kernel lists PCI devices.
    """
    on_bus = gpus_on_bus(pci_root)
    try:
        with Nvml(library) as nvml:
            handles = nvml.handles()
            return Driver(
                version=nvml.driver_version(),
                cuda=_or_none(nvml.cuda_version),
                gpus=tuple(_gpu(nvml, i, handle) for i, handle in enumerate(handles)),
                links=tuple(_link(nvml, handles, i, j) for i, j in combinations(range(len(handles)), 2)),
                on_bus=on_bus,
            )
    except NvmlError as problem:
        return Driver(problem=_explain(problem), remedy=_remedy(problem.code), on_bus=on_bus)


def gpus_on_bus(pci_root: str | Path = "/sys/bus/pci/devices") -> int:
    """Number of NVIDIA display controllers and 3D accelerators on the PCI bus."""
    count = 0
    for device in sorted(Path(pci_root).glob("*")):
        try:
            vendor, kind = (int((device / name).read_text(), 16) for name in ("vendor", "class"))
        except (OSError, ValueError):
            continue
        count += vendor == 0x10DE and kind >> 8 in (0x0300, 0x0302)
    return count


def cuda_installed() -> bool:
    """True where the driver's CUDA library is there, with or without NVML. Does not start CUDA."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cuda_started() -> bool:
    """True when CUDA has started in this process, from when on it ignores CUDA_VISIBLE_DEVICES."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):  # not loaded, or a system without RTLD_NOLOAD
        return False
    return cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0  # else 3, "not initialized"


def _gpu(nvml: Nvml, index: int, handle: Any) -> Gpu:
    total, used = _or_none(lambda: nvml.memory(handle)) or (None, None)
    mig = _or_none(lambda: nvml.mig_on(handle)) or False
    return Gpu(
        index=index,
        name=nvml.name(handle),
        uuid=nvml.uuid(handle),
        pci_bus_id=nvml.bus_id(handle),
        capability=_or_none(lambda: nvml.capability(handle)),
        total_bytes=total,
        used_bytes=used,
        mig=mig,
        instances=tuple(_instance(nvml, h) for h in nvml.mig_handles(handle)) if mig else (),
        nvlinks=nvml.nvlinks(handle),
    )


def _instance(nvml: Nvml, handle: Any) -> MigInstance:
    total, _ = _or_none(lambda: nvml.memory(handle)) or (None, None)
    return MigInstance(name=nvml.name(handle), uuid=nvml.uuid(handle), total_bytes=total)


def _link(nvml: Nvml, handles: list, source: int, target: int) -> Link:
    one, other = handles[source], handles[target]
    path = _or_none(lambda: nvml.path(one, other)) or "unknown"
    p2p = _or_none(lambda: nvml.p2p(one, other)) or "unknown"
    return Link(source=source, target=target, path=path, p2p=p2p)


def _or_none(ask: Callable[[], T]) -> T | None:
    """The answer, or None where this driver or this GPU does not know the question."""
    try:
        return ask()
    except NvmlError:
        return None


def _explain(problem: NvmlError) -> str:
    words = {
        DRIVER_NOT_LOADED: "the NVIDIA kernel module is not loaded",
        LIBRARY_MISMATCH: "the driver's library and its kernel module are of different versions",
    }
    return words.get(problem.code or 0, str(problem))


def _remedy(code: int | None) -> str:
    remedies = {
        DRIVER_NOT_LOADED: "Load it (`sudo modprobe nvidia`) or restart; in a container, start it with GPU access.",
        LIBRARY_MISMATCH: "Restart the machine: the driver was updated while the old module was in use.",
    }
    install = "Install the NVIDIA driver; in a container, start it with GPU access (`docker run --gpus all`)."
    return remedies.get(code or 0, install)
