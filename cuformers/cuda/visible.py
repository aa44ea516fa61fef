"""What CUDA_VISIBLE_DEVICES selects, entry by entry, and the choice of GPUs before CUDA starts. Imports no torch.

The rules are those of CUDA (CUDA C++ Programming Guide, environment variables; MIG User Guide, device enumeration),
in the form in which torch counts devices: the first entry decides whether all are numbers, "GPU-" names or "MIG-"
names; a number is read as far as its digits go; a name may be cut short while it stays unambiguous; the first entry
that names nothing hides itself and all after it; a device named twice hides everything. A process sees at most one
MIG instance, and no whole GPU beside it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from cuformers.base import env
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.cuda.driver import Gpu, cuda_installed, cuda_started, read

PCI_ORDER = "PCI_BUS_ID"
_NUMBER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of CUDA_VISIBLE_DEVICES."""

    text: str
    """As given."""
    gpu: int | None = None
    """nvidia-smi's index of the GPU that it names; None where it names none."""
    uuid: str | None = None
    """UUID of the GPU or MIG instance that it names."""
    visible_as: int | None = None
    """N of the `cuda:N` that it becomes; None where it is hidden."""
    why: str = ""
    """What it selects, or why it selects nothing."""


@dataclass(frozen=True, kw_only=True)
class Visible:
    """What a process sees under one value of CUDA_VISIBLE_DEVICES."""

    given: str | None
    """The value; None where the variable is unset."""
    entries: tuple[Entry, ...]
    """One for each comma-separated part; one for each GPU where the variable is unset."""

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of cuda:0, cuda:1, ..."""
        seen = sorted((e for e in self.entries if e.visible_as is not None), key=lambda e: e.visible_as or 0)
        return tuple(e.uuid or "" for e in seen)


def parse(given: str | None, gpus: Sequence[Gpu]) -> Visible:
    """What a value of CUDA_VISIBLE_DEVICES selects.

    Args:
        given: the value; None where the variable is unset, "" hides every GPU.
        gpus: the machine's GPUs in the order in which CUDA counts them.
    """
    if given is None:
        named = [_names(str(gpu.index), gpu) for gpu in gpus]
    elif given == "":
        named = [Entry(text="", why="empty: no GPU is visible, models run on the CPU")]
    else:
        named = _named(given.split(","), gpus)
    return Visible(given=given, entries=tuple(_numbered(named)))


def select_gpus(text: str, gpus: Sequence[Gpu] | None = None) -> Visible:
    """Makes the GPUs of a list, in its order, the only ones of this process; call it before CUDA starts.

    Args:
        text: numbers in nvidia-smi's order, or UUIDs, between commas: "2,0" makes GPU 2 cuda:0 and GPU 0 cuda:1.
            "" hides every GPU.
        gpus: the machine's GPUs in PCI order; asked of the driver where not given.

    Raises:
        ValueError: CUDA has started, or an entry names no GPU, or names one twice.
    """
    if cuda_started():
        remedy = "Set CUDA_VISIBLE_DEVICES before the process starts instead."
        raise bad_argument("gpus", text, "no new choice, as CUDA has started in this process", remedy)
    known = read().gpus if gpus is None else gpus
    text = ",".join(part.strip() for part in text.split(","))
    chosen = parse(text, known)
    hidden = [e for e in chosen.entries if e.visible_as is None]
    checkable = known or not cuda_installed()  # containers may have CUDA and lack NVML
    if text and hidden and checkable:
        reasons = "; ".join(f"{e.text!r}: {e.why}" for e in hidden)
        names = [f"{gpu.index} ({gpu.name}, {gpu.uuid})" for gpu in known]
        allowed = f"a list of different GPUs out of {names}" if names else "'' (CPU), as no NVIDIA GPU was found"
        raise bad_argument("gpus", text, allowed, f"Reason: {reasons}.")
    before = env.get("CUDA_VISIBLE_DEVICES")
    if before not in (None, text):
        notice(f"gpus={text!r} replaces CUDA_VISIBLE_DEVICES={before!r}")
    env.put("CUDA_VISIBLE_DEVICES", text)
    env.put("CUDA_DEVICE_ORDER", PCI_ORDER)
    return chosen


def prefer_pci_order() -> None:
    """Makes CUDA count GPUs as nvidia-smi does, unless CUDA_DEVICE_ORDER is set. Takes effect before CUDA starts."""
    if env.get("CUDA_DEVICE_ORDER") is None:
        env.put("CUDA_DEVICE_ORDER", PCI_ORDER)


def _named(texts: list[str], gpus: Sequence[Gpu]) -> list[Entry]:
    """Each entry with the device it names, up to the first that names none."""
    kind = next((prefix for prefix in ("GPU-", "MIG-") if texts[0].startswith(prefix)), "")
    keys = list(takewhile(lambda key: key is not None, (_key(text, kind) for text in texts)))
    twice = next((texts[i] for i, key in enumerate(keys) if key in keys[:i]), None)
    if twice is not None:
        return _nothing(texts, twice)
    entries: list[Entry] = []
    for i, text in enumerate(texts):
        entry = _find(text, keys[i] if i < len(keys) else None, kind, gpus)
        if entry.gpu is None:
            hidden = f"hidden by the entry {text!r} before it, which names no GPU"
            return [*entries, entry, *(Entry(text=later, why=hidden) for later in texts[i + 1 :])]
        if entry.uuid is not None and entry.uuid in [e.uuid for e in entries]:
            return _nothing(texts, text)
        entries.append(entry)
    return entries


def _key(text: str, kind: str) -> str | int | None:
    """What an entry is looked up by: the name, or the number that it begins with; None where it is not of the kind."""
    if kind:
        return text if text.startswith(kind) else None
    digits = _NUMBER.match(text.strip())
    number = int(digits.group()) if digits else -1
    return number if number >= 0 else None


def _find(text: str, key: str | int | None, kind: str, gpus: Sequence[Gpu]) -> Entry:
    if key is None:
        expected = f"a name that begins with {kind}, as the first entry does" if kind else "a number from 0"
        return Entry(text=text, why=f"not {expected}: it hides itself and all that follows")
    if isinstance(key, int):
        if key < len(gpus):
            return _names(text, gpus[key])
        return Entry(text=text, why=f"there is no GPU {key} among {len(gpus)}: it hides itself and all that follows")
    if kind == "GPU-":
        found = [_names(text, gpu) for gpu in gpus if gpu.uuid.startswith(key)]
    else:
        pairs = [(gpu, instance) for gpu in gpus for instance in gpu.instances if instance.uuid.startswith(key)]
        found = [Entry(text=text, gpu=g.index, uuid=i.uuid, why=f"{i.name} on GPU {g.index}") for g, i in pairs]
    if len(found) == 1:
        return found[0]
    problem = f"begins the names of {len(found)} devices" if found else "names no device of this machine"
    return Entry(text=text, why=f"{problem}: it hides itself and all that follows")


def _names(text: str, gpu: Gpu) -> Entry:
    """An entry that names a GPU as a whole; in MIG mode that is its first instance."""
    if not gpu.mig:
        return Entry(text=text, gpu=gpu.index, uuid=gpu.uuid, why=f"GPU {gpu.index}, {gpu.name}")
    if not gpu.instances:
        return Entry(text=text, gpu=gpu.index, why=f"GPU {gpu.index} is in MIG mode and has no instance to use")
    first = gpu.instances[0]
    return Entry(text=text, gpu=gpu.index, uuid=first.uuid, why=f"{first.name}, the first instance on GPU {gpu.index}")


def _nothing(texts: list[str], twice: str) -> list[Entry]:
    return [Entry(text=text, why=f"a device is named twice, by {twice!r} again: no GPU is visible") for text in texts]


def _numbered(entries: Sequence[Entry]) -> list[Entry]:
    """Gives out cuda:0, cuda:1, ... to the entries that select a device."""
    instance = next((e for e in entries if (e.uuid or "").startswith("MIG-")), None)
    numbered: list[Entry] = []
    count = 0
    for entry in entries:
        if entry.uuid is not None and instance in (None, entry):
            entry = replace(entry, visible_as=count)
            count += 1
        elif entry.uuid is not None and instance is not None:
            entry = replace(
                entry, why=f"hidden: a process sees one MIG instance, here {instance.uuid}, and nothing else"
            )
        numbered.append(entry)
    return numbered
