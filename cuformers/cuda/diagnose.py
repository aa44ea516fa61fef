"""Why torch does not see a GPU that is there, and what to do about it."""

from dataclasses import dataclass

from cuformers.cuda.driver import Driver
from cuformers.cuda.runtime import Torch
from cuformers.cuda.visible import Visible

OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}  # of each CUDA major version (CUDA Compatibility guide)
_START_ERRORS = (
    ("system not yet initialized", "Start the NVSwitch service: `sudo systemctl start nvidia-fabricmanager`."),
    ("unsupported display driver", "Driver and CUDA libraries don't fit: reinstall the driver, or restart."),
    (
        "unknown error",
        "Restart, or reload the module: `sudo modprobe -r nvidia_uvm; sudo modprobe nvidia_uvm`.",
    ),
    ("busy or unavailable", "Another process holds the GPU exclusively: end it, or `nvidia-smi -c DEFAULT`."),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether models can run on the GPUs of this machine."""

    gpu: bool
    """Torch computes on at least one GPU, and on every one that it sees."""
    broken: bool
    """A GPU is there and can't be used: something to repair."""
    text: str
    """One line."""
    remedy: str | None = None
    """What to do; None where nothing needs doing."""


def diagnose(driver: Driver, torch: Torch, visible: Visible) -> Verdict:
    """Compares what the driver has with what torch sees."""
    if torch.gpus:
        return _with_gpus(driver, torch, visible)
    if not (driver.gpus or driver.on_bus):
        return Verdict(gpu=False, broken=False, text="no NVIDIA GPU found; models run on the CPU")
    text, remedy = _why_unseen(driver, torch, visible)
    return Verdict(gpu=False, broken=True, text=f"torch sees no GPU, though one is there: {text}", remedy=remedy)


def _with_gpus(driver: Driver, torch: Torch, visible: Visible) -> Verdict:
    failing = [gpu for gpu in torch.gpus if gpu.problem]
    if failing:
        first = failing[0]
        text = f"torch sees cuda:{first.index} ({first.name}) and can't compute on it: {first.problem}"
        return Verdict(gpu=False, broken=True, text=text, remedy=_device_remedy(first.capability, torch))
    count = f"{len(torch.gpus)} GPU" + ("s" if len(torch.gpus) > 1 else "")
    text = f"torch computes on {count}: {', '.join(dict.fromkeys(gpu.name for gpu in torch.gpus))}"
    missing = [entry for entry in visible.entries if entry.visible_as is None]
    if visible.given and missing and driver.gpus:
        text += f"; CUDA_VISIBLE_DEVICES hides {', '.join(repr(entry.text) for entry in missing)}"
    return Verdict(gpu=True, broken=False, text=text)


def _why_unseen(driver: Driver, torch: Torch, visible: Visible) -> tuple[str, str | None]:
    if torch.cuda is None:
        remedy = "Install a build with CUDA: see https://pytorch.org/get-started/locally for the pip line."
        return f"torch {torch.version} is a build without CUDA", remedy
    if driver.problem is not None:
        return driver.problem, driver.remedy
    needed = int(torch.cuda.split(".")[0])
    if driver.cuda is not None and driver.cuda[0] < needed:
        text = f"the driver {driver.version} is too old: it runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
        update = f"Update the driver to {OLDEST_DRIVER.get(needed, 'one for CUDA ' + str(needed))} or newer"
        return f"{text}, torch is built for CUDA {torch.cuda}", f"{update}, or install a torch built for an older CUDA."
    if not visible.uuids:
        return _hidden(driver, visible)
    said = (torch.problem or "").lower()
    remedy = next((remedy for words, remedy in _START_ERRORS if words in said), None)
    return torch.problem or "it does not say why", remedy or "Check that `nvidia-smi` works, then restart the machine."


def _hidden(driver: Driver, visible: Visible) -> tuple[str, str]:
    if not driver.gpus:
        remedy = "Give the container access to it (`docker run --gpus all`), or this user access to /dev/nvidia*."
        return "the driver shows none to this user or container", remedy
    if visible.given is None:
        remedy = "Create an instance (`sudo nvidia-smi mig -cgi 0 -C`), or leave MIG mode (`sudo nvidia-smi -mig 0`)."
        return "every GPU is in MIG mode, and none has an instance", remedy
    names = ", ".join(str(gpu.index) for gpu in driver.gpus)
    remedy = f"Unset CUDA_VISIBLE_DEVICES, or set it to a list out of {names}."
    return f"CUDA_VISIBLE_DEVICES={visible.given!r} hides every GPU ({visible.entries[0].why})", remedy


def _device_remedy(capability: tuple[int, int], torch: Torch) -> str:
    have = [int("".join(filter(str.isdecimal, name.split("_")[1]))) for name in torch.architectures]
    number = capability[0] * 10 + capability[1]
    if have and number < min(have):
        return f"torch {torch.version} has dropped this GPU's architecture: install an older torch, or use the CPU."
    if have and number // 10 > max(have) // 10:
        return f"torch {torch.version} is older than this GPU: install a newer one."
    return "Check that `nvidia-smi` works and that no other process holds the GPU; then restart the machine."
