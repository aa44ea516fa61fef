"""`cuformers env` on machines that we have and don't have."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cuformers.cli import attention_matrix, env, probes
from cuformers.cli.attention_matrix import matrix
from cuformers.cli.tables import cell, label, show
from cuformers.cuda.driver import Driver, Link
from cuformers.cuda.report import OpChoice, Probes, Usable, gather, supports
from cuformers.cuda.runtime import Torch
from cuformers.kernels.op import Problem
from cuformers.kernels.table import OPS, select
from cuformers.nn.attention.choose import BACKENDS
from cuformers.nn.attention.registered import AttentionInterface
from tests.cuda.machines import gpu, torch_gpu, torch_seeing

TWO = (gpu(0), gpu(1))
LINKS = (Link(source=0, target=1, path="NVLink", p2p="ok"),)
DRIVER = Driver(version="580.95.05", cuda=(13, 0), gpus=TWO, links=LINKS, on_bus=2)
BLIND = torch_seeing(problem="No CUDA GPUs are available")


def machine(driver: Driver = DRIVER, seen: Torch | None = None, **variables: str) -> Probes:
    """Probes of a machine, by default one with two GPUs that work."""
    return Probes(
        driver=lambda: driver,
        torch=lambda: torch_seeing(*TWO) if seen is None else seen,
        environment=variables.get,
        versions=lambda: {"python": "3.12.0", "flash_attn": None},
        packages=lambda: [Usable(name="triton", usable=False, why="finds no C compiler")],
        attention=lambda seen: [Usable(name="eager", usable=True, why="")],
        kernels=lambda seen: [OpChoice(op="linear", infer="triton", train="reference", passed_over="no train mode")],
    )


def test_a_machine_that_works():
    report, verdict = gather(machine(CUDA_VISIBLE_DEVICES="1,0", CUDA_DEVICE_ORDER="PCI_BUS_ID"))
    assert (verdict.gpu, verdict.broken, verdict.remedy) == (True, False, None)
    assert verdict.text == "torch computes on 2 GPUs: NVIDIA H200"
    assert [row["nvidia_smi_index"] for row in report.gpus] == [0, 1]
    assert [(row["text"], row["visible_as"]) for row in report.visible_devices] == [("1", 0), ("0", 1)]
    assert report.links == [{"from": 0, "to": 1, "path": "NVLink", "p2p": "ok", "torch_p2p": True}]
    assert (report.devices[0]["architecture"], report.devices[0]["bf16"], report.devices[0]["fp8"]) == (
        "sm_90",
        True,
        True,
    )


def test_cudas_order_stands_beside_nvidia_smis():
    swapped = torch_seeing(TWO[1], TWO[0])
    chosen = gather(machine(seen=swapped, CUDA_VISIBLE_DEVICES="1,0"))[0].selection
    assert chosen["cuda_order"] == "cuda:0 is GPU 1, cuda:1 is GPU 0"
    assert (chosen["torch_sees_what_is_selected"], chosen["pci_order_is_cuda_order"]) == (True, None)
    fastest_first = gather(machine(seen=swapped, CUDA_DEVICE_ORDER="FASTEST_FIRST"))[0].selection
    assert (fastest_first["torch_sees_what_is_selected"], fastest_first["pci_order_is_cuda_order"]) == (False, False)
    assert gather(machine())[0].selection["pci_order_is_cuda_order"] is True


def test_a_mig_instance_is_found_by_its_bus():
    whole = gpu(1, instances=("aa",))
    driver = replace(DRIVER, gpus=(TWO[0], whole))
    instance = replace(torch_gpu(0, whole), uuid="aa")
    report, verdict = gather(machine(driver, torch_seeing(gpus=(instance,)), CUDA_VISIBLE_DEVICES="MIG-aa"))
    assert report.devices[0]["nvidia_smi_index"] == 1
    assert report.selection["torch_sees_what_is_selected"] is True
    assert verdict.gpu
    assert report.gpus[1]["mig_instances"] == "MIG 1g.18gb MIG-aa"


def test_the_verdict_names_entries_that_hide_gpus():
    _, verdict = gather(machine(seen=torch_seeing(TWO[0]), CUDA_VISIBLE_DEVICES="0,5,1"))
    assert verdict.gpu and verdict.text.endswith("CUDA_VISIBLE_DEVICES hides '5', '1'")


BROKEN = {
    "driver too old": (
        machine(replace(DRIVER, version="535.129.03", cuda=(12, 2)), BLIND),
        "driver 535.129.03 is too old: it runs CUDA up to 12.2, torch is built for CUDA 13.0",
        "Update the driver to 580 or newer",
    ),
    "torch without CUDA": (
        machine(seen=Torch(version="2.11.0+cpu")),
        "2.11.0+cpu is a build without CUDA",
        "pytorch.org",
    ),
    "hidden by an empty list": (
        machine(seen=BLIND, CUDA_VISIBLE_DEVICES=""),
        "CUDA_VISIBLE_DEVICES='' hides every GPU",
        "set it to a list out of 0, 1",
    ),
    "hidden by a wrong entry": (machine(seen=BLIND, CUDA_VISIBLE_DEVICES="7"), "there is no GPU 7 among 2", "Unset"),
    "hidden by a repeated entry": (machine(seen=BLIND, CUDA_VISIBLE_DEVICES="0,0"), "named twice", "Unset"),
    "MIG mode without an instance": (
        machine(replace(DRIVER, gpus=(gpu(0, instances=()),)), BLIND),
        "none has an instance",
        "nvidia-smi mig -cgi",
    ),
    "module not loaded": (
        machine(Driver(problem="the NVIDIA kernel module is not loaded", remedy="Load it", on_bus=1), BLIND),
        "module is not loaded",
        "Load it",
    ),
    "not given to the container": (
        machine(Driver(version="580.95.05", cuda=(13, 0), on_bus=4), BLIND),
        "shows none to this user or container",
        "--gpus all",
    ),
    "NVSwitch service down": (
        machine(seen=replace(BLIND, problem="Error 802: system not yet initialized")),
        "Error 802",
        "nvidia-fabricmanager",
    ),
    "an error that we don't know": (machine(seen=replace(BLIND, problem="Error 12345")), "Error 12345", "nvidia-smi"),
    "GPU newer than torch": (
        machine(seen=torch_seeing(gpus=(replace(torch_gpu(0, TWO[0], "no kernel image"), capability=(13, 0)),))),
        "can't compute on it: no kernel image",
        "is older than this GPU",
    ),
    "GPU older than torch": (
        machine(seen=torch_seeing(gpus=(replace(torch_gpu(0, TWO[0], "no kernel image"), capability=(6, 1)),))),
        "no kernel image",
        "dropped this GPU's architecture",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_gpu_that_can_not_be_used_is_an_error_with_a_remedy(name, capsys):
    faults, text, remedy = BROKEN[name]
    assert env.main(["--json"], faults) == 1
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert (verdict["gpu"], verdict["broken"]) == (False, True)
    assert text in verdict["text"]
    assert remedy in verdict["remedy"]


def test_no_gpu_is_fine_unless_one_is_required(capsys):
    bare = machine(Driver(problem="the driver's library is not installed", remedy="Install it"), BLIND)
    assert env.main([], bare) == 0
    assert "no NVIDIA GPU found; models run on the CPU" in capsys.readouterr().out
    assert env.main(["--require-gpu"], bare) == 1
    assert env.main(["--require-gpu"], machine()) == 0


def test_cuda_without_nvml_is_fine():
    _, verdict = gather(machine(Driver(problem="the driver's library is not installed"), CUDA_VISIBLE_DEVICES="1,0"))
    assert verdict.gpu and "hides" not in verdict.text


def leaves(data: object, key: str = "") -> list[tuple[str, object]]:
    """Every (key, value) of nested dicts and lists."""
    if isinstance(data, dict):
        return [leaf for name, value in data.items() for leaf in leaves(value, name)]
    if isinstance(data, list):
        return [leaf for value in data for leaf in leaves(value, key)]
    return [(key, data)]


def test_table_and_json_have_the_same_content(capsys):
    faults = machine(CUDA_VISIBLE_DEVICES="1,0", HF_TOKEN="hf_secret")
    env.main(["--json"], faults)
    said = capsys.readouterr().out
    data = json.loads(said)
    assert data == json.loads(json.dumps(gather(faults)[0].data()))
    output = io.StringIO()
    show(data, Console(width=1000, file=output))
    table = output.getvalue()
    assert len(leaves(data)) > 60
    for title in data:
        assert label(title) in table
    for key, value in leaves(data):
        assert label(key) in table
        assert cell(key, value).plain in table
    assert "hf_secret" not in said + table and "HF_TOKEN" in table


def test_number_formats_by_capability():
    assert supports((7, 5)) == {"bf16": False, "fp8": False}
    assert supports((8, 6)) == {"bf16": True, "fp8": False}
    assert supports((8, 9)) == {"bf16": True, "fp8": True}
    assert supports((12, 1)) == {"bf16": True, "fp8": True}


def test_without_a_gpu_backends_and_kernels_say_that_they_need_one():
    blind = Torch(version="2.11.0")
    rows = {row.name: row for row in probes.attention(blind)}
    assert rows["eager"].usable and rows["sdpa"].usable and rows["sdpa: math"].usable
    for name in ("sdpa: cudnn", "sdpa: efficient", "flash_attention_2"):
        assert not rows[name].usable and "NVIDIA GPU" in rows[name].why
    assert {"flash_attention_3", "flash_attention_4", "flex_attention"} <= set(rows)
    assert all(row.usable or row.why for row in rows.values())
    choices = {c.op: c for c in select(Problem(device="cpu")).choices}
    for row in probes.kernels(blind):
        assert row.infer == choices[row.op].implementation.name
        assert all(reason in row.passed_over for reason in choices[row.op].refused.values())
    assert [row.op for row in probes.kernels(blind)] == [op.name for op in OPS]


def test_kernels_are_chosen_for_the_gpu_that_torch_sees():
    problem = Problem(device="cuda", capability=(9, 0), dtype=torch.bfloat16)
    best = [next(i.name for i in op.implementations if i.why_not(problem) is None) for op in OPS]
    assert [row.infer for row in probes.kernels(torch_seeing(*TWO))] == best
    assert "triton" in best


def test_triton_lacks_what_it_compiles_with(tmp_path):
    assert "C compiler" in (probes.triton_problem(lambda name: None) or "")
    assert "Python.h" in (probes.triton_problem(lambda name: "/usr/bin/gcc", str(tmp_path)) or "")
    (tmp_path / "Python.h").touch()
    assert probes.triton_problem({"clang": "/usr/bin/clang"}.get, str(tmp_path)) is None


def test_versions_are_those_of_the_modules():
    found = probes.versions()
    assert found["torch"] == torch.__version__.split("+")[0] or found["torch"] == torch.__version__
    assert found["cuformers"] in (Path(__file__).parent.parent / "pyproject.toml").read_text()


@pytest.fixture
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionInterface, "known", {})


@pytest.mark.usefixtures("nothing_registered")
def test_attention_as_a_matrix(capsys: pytest.CaptureFixture[str]):
    assert env.main(["--attention", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["attention"]}
    assert list(rows) == list(BACKENDS)
    assert rows["eager"]["usable"] and all(rows["eager"][what] for what in ("training", "window", "softcap", "sinks"))
    assert rows["sdpa"]["window"] and not rows["sdpa"]["softcap"]
    assert "softcap: has no softcap" in rows["sdpa"]["remarks"]
    assert env.main(["--attention"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BACKENDS)
    with pytest.raises(SystemExit):
        env.main(["--attention", "--require-gpu"])


@pytest.mark.usefixtures("nothing_registered")
def test_the_matrix_measures_what_can_be_used_and_says_what_fails():
    asked = []

    def measure(backend, device, dtype, backward):
        asked.append((backend.name, backward))
        if backend.name == "eager" and backward:
            raise RuntimeError("out of memory\nlong story")
        return 2.0 if backward else 1.0

    rows = {row.name: row for row in matrix(torch.device("cpu"), torch.float32, measure)}
    assert set(asked) == {(n, b) for n in ("sdpa", "eager", "flex_attention") for b in (False, True)} - {
        ("flex_attention", True)
    }
    assert (rows["sdpa"].forward_tflops, rows["sdpa"].backward_tflops) == (1.0, 2.0)
    assert (rows["flex_attention"].forward_tflops, rows["flex_attention"].backward_tflops) == (1.0, None)
    assert rows["eager"].backward_tflops is None and rows["eager"].remarks == "not measured: out of memory"
    assert not rows["triton"].usable and "NVIDIA GPU" in rows["triton"].remarks
    AttentionInterface.register("mine", lambda module, query, key, value, attention_mask, **kwargs: None)
    assert matrix(torch.device("cpu"), torch.float32, measure)[-1].name == "mine"


def test_a_figure_is_products_over_time(monkeypatch: pytest.MonkeyPatch):
    sizes = {"BATCH": 2, "LENGTH": 64, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16}
    for name, value in sizes.items():
        monkeypatch.setattr(attention_matrix, name, value)
    monkeypatch.setattr(attention_matrix, "seconds_a_call", lambda work, device: work() is None or 1e-3)
    for backward, products in ((False, 2), (True, 5)):
        figure = attention_matrix.tflops(BACKENDS["sdpa"](), torch.device("cpu"), torch.float32, backward)
        half_of_all_pairs = 2 * 4 * 64**2 / 2
        assert figure == pytest.approx(products * 2 * half_of_all_pairs * 16 / 1e-3 / 1e12)


@pytest.mark.gpu
def test_the_matrix_on_this_gpu(capsys):
    assert env.main(["--attention", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["attention"]}
    for name in ("sdpa", "flash_attention_2", "flex_attention"):
        row = rows[name]
        assert row["usable"] and row["forward_tflops"] > 1 and row["backward_tflops"] > 1, row
    assert rows["triton"]["forward_tflops"] > 1 and rows["triton"]["backward_tflops"] is None


@pytest.mark.gpu
def test_the_report_on_this_gpu(capsys):
    assert env.main(["--json", "--require-gpu"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["torch"]["device_count"] == torch.cuda.device_count()
    for index, row in enumerate(data["devices"]):
        major, minor = torch.cuda.get_device_capability(index)
        assert row["architecture"] == f"sm_{major}{minor}"
        assert row["name"] == torch.cuda.get_device_name(index)
        assert row["sms"] == torch.cuda.get_device_properties(index).multi_processor_count
        assert row["total_bytes"] == torch.cuda.mem_get_info(index)[1]
    assert data["selection"]["torch_sees_what_is_selected"]
    usable = {row["name"]: row["usable"] for row in data["attention"]}
    assert usable["sdpa"] and usable["sdpa: math"] and usable["sdpa: flash"]
