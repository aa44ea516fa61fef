"""The driver's facts, read through a stand-in for NVML."""

from dataclasses import replace

import pytest

from cuformers.cuda import nvml
from cuformers.cuda.driver import gpus_on_bus, read
from tests.cuda.machines import FakeNvml, gpu


def test_reads_back_what_nvml_knows(tmp_path):
    gpus = [gpu(0), replace(gpu(1), capability=(12, 1), total_bytes=None, used_bytes=None, nvlinks=0)]
    library = FakeNvml(gpus)
    driver = read(library, tmp_path)
    assert driver.gpus == tuple(gpus)
    assert (driver.version, driver.cuda, driver.problem) == ("580.95.05", (13, 0), None)
    links = [(link.source, link.target, link.path, link.p2p) for link in driver.links]
    assert links == [(0, 1, "NVLink", "ok")]
    assert library.shut_down == 1


def test_reads_mig_instances_past_holes(tmp_path):
    machine = gpu(0, instances=("aa", "ab"))
    assert read(FakeNvml([machine]), tmp_path).gpus == (machine,)


def test_without_nvlink_the_bridge_is_named(tmp_path):
    driver = read(FakeNvml([gpu(0), gpu(1)], nvlink=False), tmp_path)
    assert {link.path for link in driver.links} == {"NODE"}


def test_an_old_driver_lacks_functions(tmp_path):
    absent = ("nvmlDeviceGetMigMode", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetP2PStatus")
    driver = read(FakeNvml([gpu(0), gpu(1)], missing=absent, cuda=11040), tmp_path)
    assert driver.cuda == (11, 4)
    assert [g.capability for g in driver.gpus] == [None, None]
    assert {(link.path, link.p2p) for link in driver.links} == {("unknown", "unknown")}


@pytest.mark.parametrize(("code", "text"), [(9, "module is not loaded"), (18, "different versions"), (999, "code 999")])
def test_a_driver_that_says_no_is_an_answer(tmp_path, code, text):
    driver = read(FakeNvml([gpu(0)], init_code=code), tmp_path)
    assert driver.gpus == () and driver.version is None
    assert text in (driver.problem or "") and driver.remedy


def test_no_driver_is_an_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(nvml, "NAMES", ("libnothing-of-the-kind.so.1",))
    driver = read(None, tmp_path)
    assert "libnvidia-ml.so.1 is not installed" in (driver.problem or "")
    assert "Install the NVIDIA driver" in (driver.remedy or "")


def test_counts_display_controllers_and_accelerators_on_the_bus(tmp_path):
    devices = {
        "accelerator": ("0x10de", "0x030200"),
        "display": ("0x10de", "0x030000"),
        "nvswitch": ("0x10de", "0x068000"),
        "another maker's": ("0x8086", "0x030000"),
    }
    for name, (vendor, kind) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    (tmp_path / "nothing to read").mkdir()
    assert gpus_on_bus(tmp_path) == 2
