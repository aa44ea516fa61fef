"""Machines that tests pretend to have: GPUs, an NVML that knows them, and what torch would say."""

from dataclasses import dataclass, field

from cuformers.cuda.driver import Gpu, MigInstance
from cuformers.cuda.runtime import Torch, TorchGpu

H200 = "NVIDIA H200"
NOT_SUPPORTED, INVALID, NOT_FOUND = 3, 2, 6


def gpu(index: int, name: str = H200, instances: tuple[str, ...] | None = None) -> Gpu:
    """GPU `index`, with a UUID that begins with its index twice; in MIG mode where instances are given."""
    uuid = f"GPU-{index}{index}aa0000-1111-2222-3333-44445555666{index}"
    found = tuple(MigInstance(name="MIG 1g.18gb", uuid=f"MIG-{i}", total_bytes=18 << 30) for i in instances or ())
    return Gpu(
        index=index,
        name=name,
        uuid=uuid,
        pci_bus_id=f"00000000:{index + 7:02X}:00.0",
        capability=(9, 0),
        total_bytes=141 << 30,
        used_bytes=1 << 30,
        mig=instances is not None,
        instances=found,
        nvlinks=18,
    )


def torch_gpu(index: int, physical: Gpu, problem: str | None = None) -> TorchGpu:
    """How torch shows a physical GPU as cuda:index."""
    return TorchGpu(
        index=index,
        name=physical.name,
        uuid=physical.uuid.removeprefix("GPU-"),
        pci_bus_id=physical.pci_bus_id.lower().removesuffix(".0"),
        capability=physical.capability or (9, 0),
        num_sms=132,
        total_bytes=140 << 30,
        free_bytes=139 << 30,
        problem=problem,
    )


def torch_seeing(*physical: Gpu, **changes) -> Torch:
    """A CUDA build of torch that sees these GPUs, in this order."""
    count = len(physical)
    facts = {
        "version": "2.11.0+cu130",
        "cuda": "13.0",
        "architectures": ("sm_80", "sm_90", "sm_100", "sm_120"),
        "gpus": tuple(torch_gpu(i, g) for i, g in enumerate(physical)),
        "peers": tuple((i, j) for i in range(count) for j in range(count) if i != j),
    }
    return Torch(**{**facts, **changes})


@dataclass
class FakeNvml:
    """libnvidia-ml over a list of GPUs: each function writes its out-arguments and returns a code, as C does."""

    gpus: list[Gpu]
    init_code: int = 0
    driver: str = "580.95.05"
    cuda: int = 13000
    nvlink: bool = True
    shut_down: int = 0
    missing: tuple[str, ...] = ()
    handles: dict = field(default_factory=dict)

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "missing"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def _new_handle(self, out, thing) -> int:
        number = len(self.handles) + 1
        self.handles[number] = thing
        out._obj.value = number
        return 0

    def _of(self, handle):
        return self.handles[handle.value]

    def nvmlInit_v2(self) -> int:
        return self.init_code

    def nvmlShutdown(self) -> int:
        self.shut_down += 1
        return 0

    def nvmlSystemGetDriverVersion(self, buffer, size) -> int:
        buffer.value = self.driver.encode()
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, out) -> int:
        out._obj.value = self.cuda
        return 0

    def nvmlDeviceGetCount_v2(self, out) -> int:
        out._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, out) -> int:
        return self._new_handle(out, self.gpus[index.value])

    def nvmlDeviceGetName(self, handle, buffer, size) -> int:
        buffer.value = self._of(handle).name.encode()
        return 0

    def nvmlDeviceGetUUID(self, handle, buffer, size) -> int:
        buffer.value = self._of(handle).uuid.encode()
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle, out) -> int:
        out._obj.bus_id = self._of(handle).pci_bus_id.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, out) -> int:
        thing = self._of(handle)
        if thing.total_bytes is None:
            return NOT_SUPPORTED
        out._obj.total, out._obj.used = thing.total_bytes, getattr(thing, "used_bytes", 0)
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor) -> int:
        major._obj.value, minor._obj.value = self._of(handle).capability
        return 0

    def nvmlDeviceGetMigMode(self, handle, now, pending) -> int:
        now._obj.value = int(self._of(handle).mig)
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle, out) -> int:
        out._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index, out) -> int:
        instances = self._of(handle).instances
        place = index.value - 1  # a hole at 0
        return self._new_handle(out, instances[place]) if 0 <= place < len(instances) else NOT_FOUND

    def nvmlDeviceGetNvLinkState(self, handle, link, out) -> int:
        if link.value >= self._of(handle).nvlinks:
            return INVALID
        out._obj.value = 1
        return 0

    def nvmlDeviceGetP2PStatus(self, one, other, what, out) -> int:
        nvlink_asked = what.value == 2
        out._obj.value = 5 if nvlink_asked and not self.nvlink else 0
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other, out) -> int:
        out._obj.value = 40
        return 0
