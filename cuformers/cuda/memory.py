"""How much memory a device has, how much is free, and what this process has taken; all in bytes."""

from pathlib import Path

import torch

from cuformers.cuda.device import gpu_index

Device = torch.device | str | int
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_V2 = ("memory.max", "memory.current", "inactive_file")  # control group files: limit, use; row of reclaimable cache
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_bytes(device: Device) -> int:
    """Memory that a new allocation can get.

    On a GPU: what the driver calls free, plus what torch's allocator holds without using it. On the CPU: what the
    kernel calls available, within the limit of the container where there is one.
    """
    index = gpu_index(device)
    if index is None:
        return _host_free()
    unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return torch.cuda.mem_get_info(index)[0] + unused


def total_bytes(device: Device) -> int:
    """Memory of the device; for the CPU, of the machine or of the container, whichever is less."""
    index = gpu_index(device)
    if index is None:
        return _host_total()
    return torch.cuda.mem_get_info(index)[1]


def allocated_bytes(device: Device) -> int:
    """Memory in use by this process: its live tensors on a GPU, its resident memory on the CPU."""
    index = gpu_index(device)
    return _process("VmRSS") if index is None else torch.cuda.memory_allocated(index)


def peak_bytes(device: Device) -> int:
    """The most that `allocated_bytes` has been since the process began or `reset_peak` was called."""
    index = gpu_index(device)
    return _process("VmHWM") if index is None else torch.cuda.max_memory_allocated(index)


def reset_peak(device: Device) -> None:
    """Starts a new count of `peak_bytes`."""
    index = gpu_index(device)
    if index is not None:
        torch.cuda.reset_peak_memory_stats(index)
        return
    clear = Path("/proc/self/clear_refs")  # 5: the resident set's high-water mark starts again (proc(5))
    if clear.exists():
        clear.write_text("5")


def release_cached(device: Device) -> None:
    """Gives memory that torch's allocator holds without using it back to the driver. Waits for the device."""
    if gpu_index(device) is not None:
        torch.cuda.empty_cache()


def human(count: float) -> str:
    """A number of bytes to read: `human(150_000_000_000)` is "139.7 GiB"."""
    size, unit = float(count), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def _host_total() -> int:
    limits = [_table("/proc/meminfo").get("MemTotal", 0), *(limit for limit, _ in _container_limits())]
    return min((n for n in limits if n), default=0)


def _host_free() -> int:
    rooms = [max(0, limit - used) for limit, used in _container_limits()]
    return min([_table("/proc/meminfo").get("MemAvailable", 0), *rooms])


def _process(row: str) -> int:
    return _table("/proc/self/status").get(row, 0)


def _table(path: str) -> dict[str, int]:
    """Rows "Name:  123 kB" of a proc file, in bytes; empty on systems without proc."""
    rows = {}
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if len(fields) == 2 and fields[1] == "kB":
            rows[name] = int(fields[0]) * 1024
    return rows


def _container_limits(root: str = "/sys/fs/cgroup") -> list[tuple[int, int]]:
    """Limit and use of this process's memory control groups, v2 or v1, parents included; page cache is not use."""
    limits = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = Path(root), _V2
        elif "memory" in controllers.split(","):
            base, names = Path(root, "memory"), _V1
        else:
            continue
        folder = base / path.strip("/")
        for group in (folder, *folder.parents):
            limits += _limit_of(group, *names)
            if group == base:
                break
    return limits


def _limit_of(group: Path, limit_name: str, used_name: str, cache_name: str) -> list[tuple[int, int]]:
    limit, used = _read(group / limit_name).strip(), _read(group / used_name).strip()
    if not limit.isdecimal() or not used.isdecimal():  # "max", or no such group in this namespace
        return []
    rows = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
    return [(int(limit), int(used) - int(rows.get(cache_name, 0)))]


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
