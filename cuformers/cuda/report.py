"""The report behind `cuformers env`: what driver, CUDA and torch say, joined, with a verdict and its remedy."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations

from cuformers.base import env
from cuformers.cuda.diagnose import Verdict, diagnose
from cuformers.cuda.driver import Driver, Gpu
from cuformers.cuda.runtime import Torch, TorchGpu
from cuformers.cuda.visible import Visible, parse

BF16_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
_SECRET = frozenset({"HF_TOKEN"})


@dataclass(frozen=True, kw_only=True)
class Usable:
    """Whether one thing can be used here, for example an attention backend."""

    name: str
    usable: bool
    why: str
    """Why not, or with what limits."""


@dataclass(frozen=True, kw_only=True)
class OpChoice:
    """What computes an op here: the best implementation that can, in each mode."""

    op: str
    infer: str
    train: str
    passed_over: str
    """The better ones, and why they can't."""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Where the report's facts come from; tests put machines here that they don't have."""

    driver: Callable[[], Driver]
    torch: Callable[[], Torch]
    environment: Callable[[str], str | None]
    versions: Callable[[], Mapping[str, str | None]]
    packages: Callable[[], list[Usable]]
    attention: Callable[[Torch], list[Usable]]
    kernels: Callable[[Torch], list[OpChoice]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that `cuformers env` shows: each field is a section, its values plain data for JSON."""

    versions: dict
    """Python, this package, torch and what else decides behaviour; None where not installed."""
    driver: dict
    """The NVIDIA driver: its version, the CUDA it runs, why it can't be asked."""
    torch: dict
    """The build of torch, and what it says where it sees no GPU."""
    gpus: list[dict]
    """The physical GPUs as the driver lists them, in nvidia-smi's order."""
    selection: dict
    """CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER as given, and CUDA's order beside nvidia-smi's."""
    visible_devices: list[dict]
    """What each entry of CUDA_VISIBLE_DEVICES selects."""
    devices: list[dict]
    """The GPUs as torch sees them, in the order of cuda:N, with the number formats they compute in."""
    links: list[dict]
    """What connects the GPUs, for each pair."""
    packages: list[dict]
    """What kernels need beside torch, and why some of it can't be used here."""
    attention: list[dict]
    """The attention implementations, and why some can't be used here."""
    kernels: list[dict]
    """What computes each op, and why the better implementations can't."""
    environment: list[dict]
    """The variables of base/env.py's table that are set."""
    verdict: dict
    """Whether models can run on the GPU, and what to do where they can't."""

    def data(self) -> dict:
        """The report as dicts, lists, strings, numbers, booleans and None."""
        return asdict(self)


def gather(probes: Probes) -> tuple[Report, Verdict]:
    """Asks every probe once and joins the answers."""
    driver, torch = probes.driver(), probes.torch()
    given, order = (probes.environment(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"))
    visible = parse(given, driver.gpus)
    verdict = diagnose(driver, torch, visible)
    report = Report(
        versions=dict(probes.versions()),
        driver=_driver(driver),
        torch=_torch(torch),
        gpus=[_gpu(gpu) for gpu in driver.gpus],
        selection=_selection(visible, order, driver, torch),
        visible_devices=[asdict(entry) for entry in visible.entries],
        devices=[_device(gpu, driver) for gpu in torch.gpus],
        links=[_link(driver, torch, one, other) for one, other in combinations(driver.gpus, 2)],
        packages=[asdict(row) for row in probes.packages()],
        attention=[asdict(row) for row in probes.attention(torch)],
        kernels=[asdict(row) for row in probes.kernels(torch)],
        environment=_environment(probes.environment),
        verdict=asdict(verdict),
    )
    return report, verdict


def supports(capability: tuple[int, int]) -> dict[str, bool]:
    """The number formats that a GPU's tensor cores compute in: bf16 from 8.0 (Ampere), fp8 from 8.9 (Ada)."""
    return {"bf16": capability >= BF16_CAPABILITY, "fp8": capability >= FP8_CAPABILITY}


def dotted(version: tuple[int, int] | None) -> str | None:
    """(9, 0) as "9.0"."""
    return None if version is None else ".".join(map(str, version))


def _driver(driver: Driver) -> dict:
    return {
        "version": driver.version,
        "cuda": dotted(driver.cuda),
        "problem": driver.problem,
        "gpus_on_pci_bus": driver.on_bus,
    }


def _torch(torch: Torch) -> dict:
    return {
        "version": torch.version,
        "built_for_cuda": torch.cuda,
        "cudnn": torch.cudnn,
        "nccl": torch.nccl,
        "architectures": ", ".join(torch.architectures),
        "device_count": len(torch.gpus),
        "problem": torch.problem,
    }


def _gpu(gpu: Gpu) -> dict:
    return {
        "nvidia_smi_index": gpu.index,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "capability": dotted(gpu.capability),
        "total_bytes": gpu.total_bytes,
        "used_bytes": gpu.used_bytes,
        "nvlinks": gpu.nvlinks,
        "mig": gpu.mig,
        "mig_instances": ", ".join(f"{i.name} {i.uuid}" for i in gpu.instances),
    }


def _selection(visible: Visible, order: str | None, driver: Driver, torch: Torch) -> dict:
    indices = [_smi_index(gpu, driver) for gpu in torch.gpus]
    known = [index for index in indices if index is not None]
    all_seen = visible.given is None and known and len(known) == len(indices)
    agree = [gpu.uuid for gpu in torch.gpus] == [_bare(uuid) for uuid in visible.uuids]
    return {
        "CUDA_VISIBLE_DEVICES": visible.given,
        "CUDA_DEVICE_ORDER": order,
        "cuda_order": ", ".join(f"cuda:{n} is GPU {index}" for n, index in enumerate(indices)),
        "pci_order_is_cuda_order": known == sorted(known) if all_seen else None,
        "gpus_of_different_kinds": len({gpu.name for gpu in driver.gpus}) > 1,
        "torch_sees_what_is_selected": agree if driver.gpus and torch.gpus else None,
    }


def _device(gpu: TorchGpu, driver: Driver) -> dict:
    return {
        "device": f"cuda:{gpu.index}",
        "nvidia_smi_index": _smi_index(gpu, driver),
        "name": gpu.name,
        "capability": dotted(gpu.capability),
        "architecture": f"sm_{gpu.capability[0]}{gpu.capability[1]}",
        "sms": gpu.num_sms,
        "total_bytes": gpu.total_bytes,
        "free_bytes": gpu.free_bytes,
        **supports(gpu.capability),
        "problem": gpu.problem,
    }


def _smi_index(gpu: TorchGpu, driver: Driver) -> int | None:
    """nvidia-smi's index of a GPU of torch: by UUID, or by the PCI bus where a MIG instance hides the UUID."""
    place = gpu.pci_bus_id.lower()
    same = (g.index for g in driver.gpus if _bare(g.uuid) == gpu.uuid or g.pci_bus_id.lower().startswith(place))
    return next(same, None)


def _bare(uuid: str) -> str:
    """The UUID as torch writes it."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def _link(driver: Driver, torch: Torch, one: Gpu, other: Gpu) -> dict:
    link = next((k for k in driver.links if (k.source, k.target) == (one.index, other.index)), None)
    cuda = {_smi_index(gpu, driver): gpu.index for gpu in torch.gpus}
    ends = (cuda.get(one.index), cuda.get(other.index))
    return {
        "from": one.index,
        "to": other.index,
        "path": link.path if link else None,
        "p2p": link.p2p if link else None,
        "torch_p2p": {ends, ends[::-1]} <= set(torch.peers) if None not in ends else None,
    }


def _environment(ask: Callable[[str], str | None]) -> list[dict]:
    rows = []
    for name, meaning in env.VARIABLES:
        value = ask(name)
        if value is not None:
            rows.append({"name": name, "value": "(set, not shown)" if name in _SECRET else value, "meaning": meaning})
    return rows
