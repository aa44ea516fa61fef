"""What torch says about CUDA and the GPUs it sees. Asking starts CUDA."""

import warnings
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cuformers.cuda.device import capability, device_count, device_name, num_sms
from cuformers.cuda.memory import free_bytes, total_bytes

SDPA_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, kw_only=True)
class TorchGpu:
    """A GPU as torch sees it."""

    index: int
    """N of cuda:N."""
    name: str
    """Product name."""
    uuid: str
    """As torch gives it: without the "GPU-" or "MIG-" of the driver's."""
    pci_bus_id: str
    """domain:bus:device."""
    capability: tuple[int, int]
    """Compute capability."""
    num_sms: int
    """Streaming multiprocessors."""
    total_bytes: int
    """Memory."""
    free_bytes: int | None
    """Memory that can still be had; None where the GPU does not answer."""
    problem: str | None = None
    """Why torch can't compute on it; None where a first sum came out right."""


@dataclass(frozen=True, kw_only=True)
class Torch:
    """The installed torch and what it makes of this machine."""

    version: str
    """For example "2.11.0+cu130"."""
    cuda: str | None = None
    """CUDA version that it is built for; None for a build without CUDA."""
    cudnn: str | None = None
    """Version of cuDNN."""
    nccl: str | None = None
    """Version of NCCL."""
    architectures: tuple[str, ...] = ()
    """What its kernels are compiled for: "sm_90", "compute_120"."""
    gpus: tuple[TorchGpu, ...] = ()
    """The visible GPUs, in the order of cuda:N."""
    peers: tuple[tuple[int, int], ...] = ()
    """Pairs (i, j) where cuda:i can read the memory of cuda:j."""
    problem: str | None = None
    """What torch says where it sees no GPU."""


def read() -> Torch:
    """Asks torch. Its warnings are taken for the answer, not printed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = device_count()
        return Torch(
            version=torch.__version__,
            cuda=torch.version.cuda,
            cudnn=_cudnn(),
            nccl=_nccl(),
            architectures=tuple(torch.cuda.get_arch_list()),
            gpus=tuple(_gpu(i) for i in range(count)),
            peers=tuple(
                (i, j) for i in range(count) for j in range(count) if i != j and torch.cuda.can_device_access_peer(i, j)
            ),
            problem=None if count else _why_none(),
        )


def sdpa_problem(kernel: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why one kernel of scaled_dot_product_attention can't compute a small causal attention; None where it can.

    Args:
        kernel: a key of `SDPA_KERNELS`.
        device: where to try it.
        dtype: of queries, keys and values.
    """
    x = torch.ones(1, 2, 16, 64, dtype=dtype, device=device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(SDPA_KERNELS[kernel]):
                scaled_dot_product_attention(x, x, x, is_causal=True)
        except RuntimeError as problem:
            reasons = [_first_sentence(str(w.message)) for w in said]
            return next((r for r in reversed(reasons) if "not used because" not in r), _first_sentence(str(problem)))
    return None


def _first_sentence(text: str) -> str:
    return text.split(" (Triggered internally")[0].strip().splitlines()[0]


def _gpu(index: int) -> TorchGpu:
    properties = torch.cuda.get_device_properties(index)
    bus = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    problem = _first_sum(index)
    return TorchGpu(
        index=index,
        name=device_name(index),
        uuid=str(properties.uuid),
        pci_bus_id="{:08x}:{:02x}:{:02x}".format(*bus),
        capability=capability(index) or (0, 0),
        num_sms=num_sms(index),
        total_bytes=properties.total_memory if problem else total_bytes(index),
        free_bytes=None if problem else free_bytes(index),
        problem=problem,
    )


def _first_sum(index: int) -> str | None:
    try:
        total = torch.arange(1, 101, device=f"cuda:{index}").sum().item()
    except RuntimeError as problem:  # for example: no kernel image for this architecture
        return str(problem).splitlines()[0]
    return None if total == 5050 else f"the sum of 1 to 100 came out as {total}"


def _why_none() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as problem:  # the latter from builds without CUDA
        return str(problem).splitlines()[0]
    return "CUDA starts and shows no GPU"


def _cudnn() -> str | None:
    number = torch.backends.cudnn.version() if torch.version.cuda else None
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _nccl() -> str | None:
    if not (torch.version.cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))
