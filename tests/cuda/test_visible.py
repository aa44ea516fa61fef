"""CUDA_VISIBLE_DEVICES: against torch's own reading of it, and the cases that torch leaves to the driver."""

import os
from itertools import takewhile

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cuformers.cuda import visible
from cuformers.cuda.visible import parse, prefer_pci_order, select_gpus
from tests.cuda.machines import gpu

FOUR = [gpu(i) for i in range(4)]
UUIDS = [g.uuid for g in FOUR]
PLAIN = st.sampled_from(["0", "1", "2", "3", "4", "-1", "", " 1", "1gpu", "x", "+2", "00", "-0", "GPU-"])
PREFIX = st.sampled_from(
    ["GPU-", "GPU-0", "GPU-00aa", "GPU-11", "GPU-2", "GPU-33aa0000", "GPU-9", UUIDS[0], UUIDS[3], "1"]
)


def indices(value: str | None, gpus=FOUR) -> list[int]:
    """nvidia-smi's index of cuda:0, cuda:1, ..."""
    by_uuid = {g.uuid: g.index for g in gpus}
    return [by_uuid[uuid] for uuid in parse(value, gpus).uuids]


def as_torch_reads(value: str) -> list[int]:
    """The same from the functions by which torch counts devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", value)
        listed = torch.cuda._parse_visible_devices()
    if listed and isinstance(listed[0], str):
        return torch.cuda._transform_uuid_to_ordinals(listed, UUIDS)
    return list(takewhile(lambda i: i < len(FOUR), listed))


@given(st.lists(PLAIN, min_size=1, max_size=5))
def test_numbers_are_read_as_torch_reads_them(parts):
    value = ",".join(parts)
    assume(value)
    assert indices(value) == as_torch_reads(value)


@given(st.lists(PREFIX, min_size=1, max_size=5))
def test_uuids_are_read_as_torch_reads_them(parts):
    value = ",".join(parts)
    assert indices(value) == as_torch_reads(value)


@given(st.lists(st.one_of(PLAIN, PREFIX), min_size=1, max_size=6))
def test_every_entry_is_explained_and_numbered_in_order(parts):
    value = ",".join(parts)
    seen = parse(value, FOUR)
    assert [entry.text for entry in seen.entries] == value.split(",")
    assert all(entry.why for entry in seen.entries)
    numbers = [entry.visible_as for entry in seen.entries if entry.visible_as is not None]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("0,2", [0, 2]),
        ("2,0", [2, 0]),
        ("1,7,0", [1]),
        ("-1", []),
        ("3,-1,0", [3]),
        ("2,2", []),
        (f"{UUIDS[2]},GPU-00", [2, 0]),
        ("GPU-0,GPU-00", []),
        ("GPU-1,0", [1]),
        ("0,GPU-1", [0]),
    ],
)
def test_known_values(value, expected):
    assert indices(value) == expected


def test_explanations_name_the_culprit():
    one, seven, zero = parse("1,7,0", FOUR).entries
    assert (one.gpu, one.visible_as) == (1, 0)
    assert "there is no GPU 7 among 4" in seven.why
    assert "'7'" in zero.why and zero.visible_as is None
    assert all("named twice, by '2'" in entry.why for entry in parse("1,2,2", FOUR).entries)
    assert "begins the names of 4 devices" in parse("GPU-", FOUR).entries[0].why


def test_a_process_sees_one_mig_instance_and_nothing_beside_it():
    gpus = [gpu(0), gpu(1, instances=("aa", "ab")), gpu(2, instances=())]
    assert parse("MIG-ab", gpus).uuids == ("MIG-ab",)
    assert parse("MIG-a", gpus).uuids == ()  # ambiguous
    assert parse("MIG-ab,MIG-aa", gpus).uuids == ("MIG-ab",)
    assert parse("0,1", gpus).uuids == ("MIG-aa",)
    assert parse("2,0", gpus).uuids == (gpus[0].uuid,)
    assert parse(None, gpus).uuids == ("MIG-aa",)
    assert "one MIG instance" in parse("0,1", gpus).entries[0].why
    assert "no instance" in parse("2", gpus).entries[0].why


@pytest.fixture
def clean(monkeypatch):
    """The two variables unset, and put back after the test."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(visible, "cuda_started", lambda: False)
    return monkeypatch


def test_select_gpus_sets_both_variables(clean):
    assert select_gpus("2, 0", FOUR).uuids == (UUIDS[2], UUIDS[0])
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("2,0", "PCI_BUS_ID")
    select_gpus("", FOUR)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_select_gpus_says_that_it_replaces_the_variable(clean, capsys):
    clean.setenv("CUDA_VISIBLE_DEVICES", "3")
    clean.delenv("CUFORMERS_QUIET", raising=False)
    select_gpus("1", FOUR)
    assert "gpus='1' replaces CUDA_VISIBLE_DEVICES='3'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["4", "0,0", "x", "0,,1", "-1", "GPU-9", "0,4"])
def test_select_gpus_refuses_what_would_hide_a_gpu(clean, text):
    with pytest.raises(ValueError, match=rf"gpus='{text}'.*0 \(NVIDIA H200, GPU-00aa"):
        select_gpus(text, FOUR)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_select_gpus_without_a_driver(clean):
    clean.setattr(visible, "cuda_installed", lambda: False)
    with pytest.raises(ValueError, match="no NVIDIA GPU was found"):
        select_gpus("0", [])
    clean.setattr(visible, "cuda_installed", lambda: True)  # CUDA without NVML: torch will say what it finds
    select_gpus("1,0", [])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_select_gpus_comes_before_cuda(clean):
    clean.setattr(visible, "cuda_started", lambda: True)
    with pytest.raises(ValueError, match="CUDA has started"):
        select_gpus("0", FOUR)


def test_pci_order_is_a_default_only(clean):
    prefer_pci_order()
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    clean.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    prefer_pci_order()
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
