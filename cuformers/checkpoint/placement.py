"""Which device holds which part of a model: `device_map` and `max_memory` resolved by pure arithmetic."""

from collections.abc import Mapping, Sequence

import torch

from cuformers.base.errors import bad_argument
from cuformers.checkpoint.needs import (
    CPU,
    Needs,
    Placement,
    does_not_fit,
    is_layer,
    needed_bytes,
    slowness,
    stream_buffers,
)
from cuformers.checkpoint.partition import balance, balance_low_first, fill
from cuformers.checkpoint.sizes import parse_size
from cuformers.cuda.memory import human

DeviceSpec = str | int | torch.device
DeviceMap = DeviceSpec | Mapping[str, DeviceSpec]
STRATEGIES = {"auto": balance, "balanced": balance, "balanced_low_0": balance_low_first, "sequential": fill}


def resolve_placement(
    needs: Needs,
    device_map: DeviceMap,
    devices: Mapping[torch.device, int],
    *,
    max_memory: Mapping[DeviceSpec, int | str] | None = None,
    this_gpu: torch.device | None = None,
) -> Placement:
    """The placement that a `device_map` asks for, checked against the memory there is.

    Args:
        needs: the model's units and what they need.
        device_map: a device ("cuda" is this process's GPU); a map from module names to devices, of which the longest
            matching name decides; or a strategy: "auto" and "balanced" (over all GPUs, as evenly as whole units
            allow), "balanced_low_0" (the first GPU takes only what the others can't), "sequential" (one after the
            other). Strategies put whole layers on the CPU where the GPUs are too small, and say how much slower.
        devices: free bytes of each usable device.
        max_memory: bytes to use of each device; those it leaves out are not used at all.
        this_gpu: what "cuda" means; the first GPU of `devices` unless given.

    Raises:
        ValueError: names or devices that do not exist, units left out, a layer split, disk offload.
        OutOfDeviceMemory: it does not fit; the message has needed and available bytes of each device.
    """
    budget = _budget(devices, max_memory)
    gpu = this_gpu or next((d for d in devices if d.type == "cuda"), None)
    if isinstance(device_map, Mapping):
        placed = _by_names(needs, {k: _device(k, v, budget, gpu) for k, v in device_map.items()})
    elif isinstance(device_map, str) and device_map in STRATEGIES:
        return _by_strategy(needs, device_map, budget)
    else:
        placed = dict.fromkeys(needs.units, _device("", device_map, budget, gpu))
    return _checked(needs, _as_placed(needs, placed), budget)


def _budget(
    devices: Mapping[torch.device, int], max_memory: Mapping[DeviceSpec, int | str] | None
) -> dict[torch.device, int]:
    if max_memory is None:
        return dict(devices)
    limits = {}
    for key, value in max_memory.items():
        device = _parsed("max_memory", key)
        if device not in devices:
            raise bad_argument("max_memory", key, f"one of {_names(devices)} as key")
        limits[device] = parse_size(f"max_memory[{key!r}]", value)
    return {device: min(free, limits[device]) for device, free in devices.items() if device in limits}


def _parsed(argument: str, spec: DeviceSpec) -> torch.device:
    if spec == "disk":
        raise bad_argument(argument, spec, "GPUs and 'cpu'", "There is no offload to disk: it would be unusably slow.")
    try:
        if isinstance(spec, bool):
            raise TypeError
        device = torch.device("cuda", spec) if isinstance(spec, int) else torch.device(spec)
    except (RuntimeError, TypeError, ValueError):
        allowed = f"a device, a map from module names to devices, or one of {list(STRATEGIES)}"
        raise bad_argument(argument, spec, allowed) from None
    return CPU if device.type == "cpu" else device


def _device(
    name: str, spec: DeviceSpec, budget: Mapping[torch.device, int], this_gpu: torch.device | None
) -> torch.device:
    argument = f"device_map[{name!r}]" if name else "device_map"
    device = _parsed(argument, spec)
    if device.type == "cuda" and device.index is None and this_gpu is not None:
        device = this_gpu
    if device not in budget:
        remedy = "CUDA_VISIBLE_DEVICES and max_memory decide what may be used; `cuformers env` shows what torch sees."
        raise bad_argument(argument, spec, f"one of {_names(budget)}", remedy)
    return device


def _by_names(needs: Needs, device_map: Mapping[str, torch.device]) -> dict[str, torch.device]:
    for name in device_map:
        inside = next((unit for unit in needs.units if unit and name.startswith(unit + ".")), None)
        if inside is not None:
            raise bad_argument("device_map", name, f"whole units such as {inside!r}", "A layer is never split.")
        if not any(_within(unit, name) for unit in needs.units):
            raise bad_argument("device_map", name, f"names of modules: {_some(list(needs.units))}")
    placed, bare = {}, []
    for unit in needs.units:
        covering = [name for name in device_map if _within(unit, name)]
        if covering:
            placed[unit] = device_map[max(covering, key=len)]
        else:
            bare.append(unit)
    if bare:
        raise ValueError(f"device_map leaves out {_some(bare)}: name them too, or give '' a device for all the rest.")
    for group in needs.tied:
        if len({placed[name] for name in group}) > 1:
            raise ValueError(f"device_map puts {group}, which belong together, on different devices: give them one.")
    return placed


def _within(unit: str, name: str) -> bool:
    return name in ("", unit) or unit.startswith(name + ".")


def _as_placed(needs: Needs, placed: dict[str, torch.device]) -> Placement:
    """Units on the CPU beside GPUs run on the GPU of the unit before them, or on the first one."""
    runs_on, here = {}, next((device for device in placed.values() if device.type == "cuda"), CPU)
    for name, device in placed.items():
        here = here if device == CPU else device
        runs_on[name] = here
    return _noted(needs, placed, runs_on)


def _noted(needs: Needs, placed: dict[str, torch.device], runs_on: dict[str, torch.device]) -> Placement:
    off = [name for name, device in placed.items() if device != runs_on[name]]
    return Placement(units=placed, runs_on=runs_on, notes=(slowness(needs, off),) if off else ())


def _checked(needs: Needs, placement: Placement, budget: Mapping[torch.device, int]) -> Placement:
    if any(needed > budget[device] for device, needed in needed_bytes(needs, placement).items()):
        raise does_not_fit(needs, placement, budget, "device_map='auto' uses all devices.")
    return placement


def _by_strategy(needs: Needs, strategy: str, budget: Mapping[torch.device, int]) -> Placement:
    gpus = {device: free for device, free in budget.items() if device.type == "cuda"}
    if not gpus:
        if CPU not in budget:
            raise bad_argument("max_memory", {}, "at least one device")
        return _checked(needs, _as_placed(needs, dict.fromkeys(needs.units, CPU)), budget)
    shared = {name for group in needs.tied for name in group}
    layers = [name for name in needs.units if is_layer(name) and name not in shared]
    for count in range(len(layers) + 1 if CPU in budget else 1):
        off = layers[len(layers) - count :]
        if sum(needs.units[name] for name in off) > budget.get(CPU, 0):
            break
        placement = _try(needs, strategy, gpus, off)
        if placement is not None:
            return placement
    # What one would like: everything on the GPUs. It says the most about what is lacking.
    wished = _try(needs, strategy, dict.fromkeys(gpus, 2 * sum(needs.load(n) for n in needs.units) + needs.reserve), [])
    assert wished is not None, "unlimited GPUs hold everything"
    raise does_not_fit(needs, wished, budget, _with_all_layers_off(needs, layers) if CPU in budget else "")


def _with_all_layers_off(needs: Needs, layers: Sequence[str]) -> str:
    on_cpu = sum(needs.units[name] for name in layers)
    on_gpu = sum(needs.load(name) for name in needs.units) - on_cpu + stream_buffers(needs, layers) + needs.reserve
    return f"With every layer on the CPU, the CPU would need {human(on_cpu)} and the GPUs still {human(on_gpu)}."


def _try(needs: Needs, strategy: str, gpus: Mapping[torch.device, int], off: Sequence[str]) -> Placement | None:
    """The placement with the layers `off` on the CPU and the rest on the GPUs; None where that does not fit.

    Tied units go where the first of their group goes, which carries their loads with its own.
    """
    leaders = {name: group[0] for group in needs.tied for name in group[1:]}
    row, off_set = [name for name in needs.units if name not in leaders], set(off)
    load_of = {name: needs.cache_per_layer if name in off_set else needs.load(name) for name in needs.units}
    for name, leader in leaders.items():
        load_of[leader] += load_of[name]
    loads = [load_of[name] for name in row]
    taken = needs.reserve + stream_buffers(needs, off)
    bins = STRATEGIES[strategy](loads, [max(0, free - taken) for free in gpus.values()])
    if bins is None:
        return None
    names = list(gpus)
    runs_on = {name: names[i] for name, i in zip(row, bins)}
    runs_on = {name: runs_on[leaders.get(name, name)] for name in needs.units}
    placed = {name: CPU if name in off_set else runs_on[name] for name in needs.units}
    return _noted(needs, placed, runs_on)


def _names(devices: Mapping[torch.device, int]) -> list[str]:
    return [str(device) for device in devices]


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
