"""NVML, the library that nvidia-smi stands on, called through ctypes: the driver's own answers, without CUDA or torch.

Function names, structures and codes are those of nvml.h (NVIDIA Management Library API reference).
"""

import ctypes
from ctypes import byref, c_char, c_int, c_uint, c_ulonglong, c_void_p
from typing import Any

NAMES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1", "nvml.dll")
NOT_FOUND, DRIVER_NOT_LOADED, LIBRARY_MISMATCH = 6, 9, 18
_P2P_NVLINK, _P2P_READ = 2, 0
_P2P_STATUS = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "I/O hub topology not supported",
    4: "disabled by a driver setting",
    5: "not supported",
}
_PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvidia-smi topo's words
_MAX_NVLINKS = 18


class NvmlError(Exception):
    """NVML is missing or said no: its code (None where the library is missing) and its words."""

    def __init__(self, code: int | None, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Pci(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("device_id", c_uint),
        ("subsystem_id", c_uint),
        ("bus_id", c_char * 32),
    )


class Nvml:
    """An initialised NVML; a context manager that shuts it down. Handles are opaque."""

    def __init__(self, library: Any = None) -> None:
        self._library = _load() if library is None else library
        self._call("nvmlInit_v2")

    def __enter__(self) -> "Nvml":
        return self

    def __exit__(self, *_: object) -> None:
        self._call("nvmlShutdown")

    def _call(self, name: str, *args: object) -> None:
        try:
            code = getattr(self._library, name)(*args)
        except AttributeError:  # a driver older than the function
            raise NvmlError(None, f"this driver has no {name}") from None
        if code != 0:
            raise NvmlError(code, f"{name} failed with NVML code {code}")

    def _int(self, name: str, *args: object) -> int:
        value = c_int()
        self._call(name, *args, byref(value))
        return value.value

    def _text(self, name: str, *args: object) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._call(name, *args, buffer, c_uint(96))
        return buffer.value.decode()

    def _handle(self, name: str, *args: object) -> c_void_p:
        handle = c_void_p()
        self._call(name, *args, byref(handle))
        return handle

    def driver_version(self) -> str:
        return self._text("nvmlSystemGetDriverVersion")

    def cuda_version(self) -> tuple[int, int]:
        """The newest CUDA that this driver runs."""
        number = self._int("nvmlSystemGetCudaDriverVersion_v2")
        return number // 1000, number % 1000 // 10

    def handles(self) -> list[c_void_p]:
        """Every GPU that this user may see, in PCI order."""
        count = self._int("nvmlDeviceGetCount_v2")
        return [self._handle("nvmlDeviceGetHandleByIndex_v2", c_uint(i)) for i in range(count)]

    def name(self, gpu: c_void_p) -> str:
        return self._text("nvmlDeviceGetName", gpu)

    def uuid(self, gpu: c_void_p) -> str:
        return self._text("nvmlDeviceGetUUID", gpu)

    def bus_id(self, gpu: c_void_p) -> str:
        pci = _Pci()
        self._call("nvmlDeviceGetPciInfo_v3", gpu, byref(pci))
        return pci.bus_id.decode()

    def memory(self, gpu: c_void_p) -> tuple[int, int]:
        """Total and used bytes. Raises on GPUs that share the host's memory (GB10, Jetson)."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", gpu, byref(memory))
        return memory.total, memory.used

    def capability(self, gpu: c_void_p) -> tuple[int, int]:
        major, minor = c_int(), c_int()
        self._call("nvmlDeviceGetCudaComputeCapability", gpu, byref(major), byref(minor))
        return major.value, minor.value

    def mig_on(self, gpu: c_void_p) -> bool:
        now, pending = c_uint(), c_uint()
        self._call("nvmlDeviceGetMigMode", gpu, byref(now), byref(pending))
        return now.value == 1

    def mig_handles(self, gpu: c_void_p) -> list[c_void_p]:
        """The MIG instances of a GPU; there may be holes between them."""
        handles = []
        for i in range(self._int("nvmlDeviceGetMaxMigDeviceCount", gpu)):
            try:
                handles.append(self._handle("nvmlDeviceGetMigDeviceHandleByIndex", gpu, c_uint(i)))
            except NvmlError as problem:
                if problem.code != NOT_FOUND:
                    raise
        return handles

    def nvlinks(self, gpu: c_void_p) -> int:
        """Number of NVLink lanes that are up."""
        up = 0
        for link in range(_MAX_NVLINKS):
            try:
                up += self._int("nvmlDeviceGetNvLinkState", gpu, c_uint(link)) == 1
            except NvmlError:  # past the last link of this GPU, or a GPU without NVLink
                break
        return up

    def p2p(self, one: c_void_p, other: c_void_p) -> str:
        """ "ok" where `one` can read the memory of `other`, else the driver's reason."""
        return _P2P_STATUS.get(self._int("nvmlDeviceGetP2PStatus", one, other, c_int(_P2P_READ)), "unknown")

    def path(self, one: c_void_p, other: c_void_p) -> str:
        """What connects two GPUs: "NVLink", or the nearest common bridge in nvidia-smi topo's words."""
        if self._int("nvmlDeviceGetP2PStatus", one, other, c_int(_P2P_NVLINK)) == 0:
            return "NVLink"
        return _PATHS.get(self._int("nvmlDeviceGetTopologyCommonAncestor", one, other), "unknown")


def _load() -> Any:
    for name in NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NvmlError(None, "the driver's library libnvidia-ml.so.1 is not installed")
