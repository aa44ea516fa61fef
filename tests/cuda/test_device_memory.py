"""The host's memory, against /proc, a large allocation and made-up containers."""

import mmap
from pathlib import Path

import pytest

from cuformers.cuda import memory

needs_proc = pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no /proc on this system")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (150_000_000_000, "139.7 GiB"),
        (-2048, "-2.0 KiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_human(count, text):
    assert memory.human(count) == text


@needs_proc
def test_an_allocation_on_the_host_is_seen():
    size = 64 << 20
    before = memory.allocated_bytes("cpu")
    memory.reset_peak("cpu")
    with mmap.mmap(-1, size) as block:  # new pages: an allocator may hand out memory that is resident already
        block.write(b"x" * size)
        assert memory.allocated_bytes("cpu") - before > size // 2
    assert memory.peak_bytes("cpu") - before > size // 2
    assert 0 < memory.free_bytes("cpu") <= memory.total_bytes("cpu")


def container(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_limit_of_a_container_counts_without_page_cache(tmp_path, monkeypatch):
    stat = "anon 5\ninactive_file 300\n"
    container(
        tmp_path,
        {
            "a/b/memory.max": "max\n",
            "a/b/memory.current": "700\n",
            "a/memory.max": "1000\n",
            "a/memory.current": "800\n",
            "a/memory.stat": stat,
        },
    )
    real = memory._read
    monkeypatch.setattr(memory, "_read", lambda path: "0::/a/b\n" if path == "/proc/self/cgroup" else real(path))
    assert memory._container_limits(str(tmp_path)) == [(1000, 500)]


def test_the_first_kind_of_control_groups(tmp_path, monkeypatch):
    container(
        tmp_path,
        {
            "memory/a/memory.limit_in_bytes": "2000\n",
            "memory/a/memory.usage_in_bytes": "900\n",
            "memory/a/memory.stat": "total_inactive_file 100\n",
        },
    )
    real = memory._read
    lines = "4:cpu,memory:/a\n3:pids:/a\n"
    monkeypatch.setattr(memory, "_read", lambda path: lines if path == "/proc/self/cgroup" else real(path))
    assert memory._container_limits(str(tmp_path)) == [(2000, 800)]


def test_a_container_bounds_what_is_free_and_total(monkeypatch):
    monkeypatch.setattr(memory, "_table", lambda path: {"MemTotal": 10_000, "MemAvailable": 6_000})
    monkeypatch.setattr(memory, "_container_limits", lambda: [(4_000, 1_000), (1 << 63, 1_000)])
    assert (memory.total_bytes("cpu"), memory.free_bytes("cpu")) == (4_000, 3_000)
