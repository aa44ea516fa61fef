"""What a model asks of the devices and where its parts were put: the terms that placement reckons in."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cuformers.base.errors import OutOfDeviceMemory
from cuformers.cuda.memory import human

CPU = torch.device("cpu")
LINK_BYTES_PER_SECOND = 55e9  # pinned host to device, measured on an H200 over PCIe 5
MEMORY_BYTES_PER_SECOND = 4.3e12  # the same card's own memory
_LAYER = re.compile(r"(^|\.)\d+$")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model asks of the devices, in units that are never split."""

    units: Mapping[str, int]
    """Module name to bytes of weights, in the order they run; a name that ends in a number is a layer. Together they
    cover every parameter, and no name lies inside another."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of units on one device: they share a weight, whose bytes count once, or run beside each other. No unit
    is in two groups."""
    cache_per_layer: int = 0
    """Bytes of KV cache that the device running a layer holds for it."""
    reserve: int = 0
    """Bytes that each GPU in use keeps free: activations, graphs, workspaces."""

    def __post_init__(self) -> None:
        for name in self.units:
            parts = name.split(".") if name else []
            outer = [".".join(parts[:i]) for i in range(len(parts))]
            inside = next((o for o in outer if o in self.units), None)
            assert inside is None, f"unit {name!r} lies inside unit {inside!r}"
        assert all(name in self.units for group in self.tied for name in group), (
            f"tied names without a unit: {self.tied}"
        )

    def load(self, name: str) -> int:
        """Bytes on the device that holds and runs the unit."""
        return self.units[name] + (self.cache_per_layer if is_layer(name) else 0)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where each unit of a model lies, and where it runs."""

    units: Mapping[str, torch.device]
    """Where the unit's weights lie."""
    runs_on: Mapping[str, torch.device]
    """Where the unit is computed: for weights on the CPU beside GPUs, the GPU that they are streamed to."""
    notes: tuple[str, ...] = ()
    """What the user should be told, a line each."""

    def device_of(self, name: str) -> torch.device:
        """Where the parameter, buffer or module of this full name lies."""
        end = len(name)
        while end >= 0:
            if name[:end] in self.units:
                return self.units[name[:end]]
            end = name.rfind(".", 0, end) if end else -1
        if "" in self.units:
            return self.units[""]
        raise AssertionError(f"{name!r} lies in no unit of the placement")

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Units whose weights lie elsewhere than they run."""
        return tuple(name for name, device in self.units.items() if device != self.runs_on[name])

    @property
    def hf_device_map(self) -> dict[str, int | str]:
        """As Transformers shows it: GPUs by index, "cpu" by name."""
        return {name: "cpu" if d.type == "cpu" else d.index or 0 for name, d in self.units.items()}


def is_layer(name: str) -> bool:
    return _LAYER.search(name) is not None


def stream_buffers(needs: Needs, offloaded: Sequence[str]) -> int:
    """Bytes on a GPU through which offloaded layers pass: one is computed with while the next one is filled."""
    return 2 * max((needs.units[name] for name in offloaded), default=0)


def needed_bytes(needs: Needs, placement: Placement) -> dict[torch.device, int]:
    """Bytes that each device in use needs: weights, cache, stream buffers, and on GPUs the reserve."""
    used = {*placement.units.values(), *placement.runs_on.values()}
    needed = {device: needs.reserve if device.type == "cuda" else 0 for device in used}
    for name, device in placement.units.items():
        needed[device] += needs.units[name]
        needed[placement.runs_on[name]] += needs.cache_per_layer if is_layer(name) else 0
    for device in used:
        needed[device] += stream_buffers(needs, [n for n in placement.offloaded if placement.runs_on[n] == device])
    return needed


def slowness(needs: Needs, offloaded: Sequence[str]) -> str:
    """What offloading costs, for the user."""
    moved, total = sum(needs.units[name] for name in offloaded), max(1, sum(needs.units.values()))
    factor = 1 + moved / total * (MEMORY_BYTES_PER_SECOND / LINK_BYTES_PER_SECOND - 1)
    return (
        f"{len(offloaded)} of {len(needs.units)} parts of the model ({human(moved)}) stay in the CPU's memory and "
        f"travel to the GPU at every step: about {factor:.2g} times slower per token than a GPU that holds all of it. "
        "Quantize, or use more or larger GPUs, to avoid it."
    )


def does_not_fit(
    needs: Needs, placement: Placement, budget: Mapping[torch.device, int], more: str
) -> OutOfDeviceMemory:
    """The error for a placement that needs more than the budget; says what each device needs and has."""
    cache = sum(map(is_layer, needs.units)) * needs.cache_per_layer
    needed = needed_bytes(needs, placement)
    lines = [
        f"The model does not fit: {human(sum(needs.units.values()))} of weights, {human(cache)} of KV cache, "
        f"{human(needs.reserve)} kept free on each GPU.",
        *(
            f"  {device}: needed {human(needed.get(device, 0))} ({needed.get(device, 0)} bytes), "
            f"available {human(available)} ({available} bytes)"
            for device, available in budget.items()
        ),
    ]
    helps = "What helps: a smaller dtype or a quantization_config, a shorter context, more or larger GPUs"
    helps += "" if CPU in budget else ", letting max_memory include 'cpu'"
    return OutOfDeviceMemory("\n".join([*lines, *([more] if more else []), helps + "."]))
