"""KernelConfig: its forms are Transformers', and mean the same."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils.kernel_config import KernelConfig as Theirs

from cuformers import KernelConfig
from cuformers.kernels.hub.rules import MODES, Rule, find
from cuformers.kernels.hub.source import Source
from cuformers.kernels.op import Problem
from tests import hub_layers
from tests.hub_layers import Bounds, Device, LayerRepository, Mode, stand_in

TRUST = {"trust_remote_code": True}
HUB: dict[str, Any] = {
    "text": "kernels-community/liger-kernels:LigerRMSNorm",
    "version": ("org/repo:Layer", {"version": 2}),
    "revision": ("org/repo:Layer", {"revision": "v2.1.0"}),
    "version-trust": ("org/repo:Layer", {"version": 0, **TRUST}),
    "revision-trust": ("org/repo:Layer", {"revision": "main", "trust_remote_code": False}),
    "device": {"cuda": "org/repo:Layer"},
    "device-tuple": {"cuda": ("org/repo:Layer", {"version": 3, **TRUST})},
    "devices": {"cuda": "org/repo:Layer", "rocm": "org/other:Layer", "xpu": ("org/third:Layer", {"version": 1})},
    "other-devices": {"npu": "org/repo:Layer", "neuron": "org/repo:Layer", "tpu": "org/repo:Layer"},
}
WRONG: dict[str, Any] = {
    "no-layer": "org/repo",
    "no-org": "repo:Layer",
    "number": 3,
    "list": ["org/repo:Layer", {"version": 1}],
    "metadata-no-dict": ("org/repo:Layer", "v1"),
    "metadata-empty": ("org/repo:Layer", {}),
    "metadata-trust-only": ("org/repo:Layer", dict(TRUST)),
    "trust-text": ("org/repo:Layer", {"version": 1, "trust_remote_code": "yes"}),
    "device": {"gpu": "org/repo:Layer"},
    "device-form": {"cuda": "org/repo"},
    "device-number": {"cuda": 3},
}


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", stand_in())


class OnCuda:
    """What Transformers asks of a model here: one registered layer, on a GPU, in inference mode."""

    training = False

    def parameters(self) -> Any:
        return iter([SimpleNamespace(device=SimpleNamespace(type="cuda"))])

    def named_modules(self) -> Any:
        return iter([("norm", SimpleNamespace(kernel_layer_name="RMSNorm"))])


def problem(mode: Any = "infer", device: str = "cuda", capability: Any = (9, 0)) -> Problem:
    return Problem(device=device, capability=capability, dtype=torch.bfloat16, mode=mode)


def found(value: Any, wanted: Problem, **options: Any) -> Rule | str:
    ((_, rules),) = KernelConfig({"RMSNorm": value}, **options).rules
    return find(rules, wanted)


def source_of(value: Any, **options: Any) -> Source:
    rule = found(value, problem(), **options)
    assert isinstance(rule, Rule) and isinstance(rule.source, Source)
    return rule.source


@pytest.mark.parametrize("value", HUB.values(), ids=HUB)
def test_forms_mean_what_they_mean_in_transformers(value: Any) -> None:
    theirs = Theirs({"RMSNorm": value})
    theirs.sanitize_kernel_mapping(OnCuda())
    theirs.create_compatible_mapping(OnCuda())
    made = theirs.kernel_mapping.get("RMSNorm")
    rule = found(value, problem())
    if made is None:
        assert rule == f"mapped for {', '.join(sorted(value))} only, the model is on cuda"
        return
    assert isinstance(rule, Rule) and isinstance(rule.source, Source)
    ours = rule.source
    assert made == {
        "cuda": {
            Mode.INFERENCE: LayerRepository(
                repo_id=ours.repo,
                layer_name=ours.layer_name,
                version=ours.version,
                revision=ours.revision,
                trust_remote_code=ours.trust_remote_code,
            )
        }
    }


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
def test_what_transformers_refuses_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        Theirs({"RMSNorm": value}).sanitize_kernel_mapping(OnCuda())
    with pytest.raises(ValueError, match="is not possible: allowed is"):
        KernelConfig({"RMSNorm": value})


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (("org/repo:Layer", {"version": 1, "revision": "main"}), "either 'version' or 'revision'"),
        (("org/repo:Layer", {"version": "1"}), "a whole number from 0 on"),
        (("org/repo:Layer", {"version": True}), "a whole number from 0 on"),
        (("org/repo:Layer", {"revision": 1}), "branch, tag or commit"),
        (("org/repo:Layer", {"version": 1, "sha": "ab"}), r"keys among \['version', 'revision'"),
        (("org/repo@v2:Layer", {"version": 1}), "one of '@...', 'version' and 'revision'"),
        ("/a/folder:Layer", "A folder needs use_local_kernel=True"),
        ("org/repo@:Layer", "'org/repo:LayerName'"),
        ({}, "at least one device"),
        ({"cuda": {"EVAL": "org/repo:Layer"}}, "a kernels.Mode, or one of"),
        ({"cuda": {}, "INFERENCE": {"cuda": "org/repo:Layer"}}, "'' for none"),
    ],
)
def test_what_would_only_fail_later_is_refused_too(value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        KernelConfig({"RMSNorm": value})


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("SwiGLUMLP", "map its activation instead"),
        ("Linear", "products are our own op"),
        ("MegaBlocksMoeMLP", "no model here has experts"),
        ("FlashAttention2", "attn_implementation"),
        ((("RMSNorm", "model.layers.*.norm"), ("MLP", "model.layers.*.mlp")), "name single layers"),
        ("RmsNorm", r"one of \['RMSNorm', 'SiLU'"),
    ],
)
def test_layers_that_are_not_possible(name: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        KernelConfig({name: "org/repo:Layer"})


def test_the_arguments() -> None:
    assert KernelConfig().rules == KernelConfig(None).rules == KernelConfig({}).rules == ()  # type: ignore[arg-type]
    assert KernelConfig({"RMSNorm": HUB["text"]}, inherit_mapping=False).rules[0][0] == "RMSNorm"
    for arguments in (("RMSNorm",), ({}, "yes"), ({}, False, 1)):
        with pytest.raises(ValueError, match="is not possible"):
            KernelConfig(*arguments)
    mapping = {"RMSNorm": HUB["text"]}
    config = KernelConfig(mapping)
    mapping["SiLU"] = HUB["text"]
    assert config == KernelConfig({"RMSNorm": HUB["text"]})


def test_without_a_version_it_is_the_first() -> None:
    assert source_of("org/repo:Layer") == source_of(("org/repo:Layer", {"version": 1}))
    assert str(source_of("org/repo:Layer")) == "org/repo@v1:Layer"


def test_revisions_and_ranges_as_documented() -> None:
    assert source_of("org/repo@v2.1.0:Layer") == source_of(("org/repo:Layer", {"revision": "v2.1.0"}))
    spanned = source_of("org/repo@>=2.0,<3.0:Layer")
    assert (spanned.version, spanned.revision, spanned.range) == (None, None, ">=2.0,<3.0")


def test_trusting_all() -> None:
    config = KernelConfig({"RMSNorm": {"cuda": "a/b:C", "cpu": ""}, "SiLU": ("d/e:F", {"version": 2})})
    trusted = config.trusting()
    sources = [rule.source for _, rules in trusted.rules for rule in rules]
    assert [isinstance(s, Source) and s.trust_remote_code for s in sources] == [True, False, True]
    assert all(not s.trust_remote_code for _, rules in config.rules for r in rules if isinstance(s := r.source, Source))


def test_local_forms(tmp_path: Path) -> None:
    kernel = hub_layers.write_kernel(tmp_path / "a kernel")
    source = source_of(f"{kernel}:Norm", use_local_kernel=True)
    assert (source.repo, source.layer_name, source.local) == (str(kernel), "Norm", True)
    theirs = Theirs({"RMSNorm": f"{kernel}:Norm"}, use_local_kernel=True)
    theirs.sanitize_kernel_mapping(OnCuda())
    theirs.create_compatible_mapping(OnCuda())
    (made,) = theirs.kernel_mapping["RMSNorm"]["cuda"].values()
    assert (made.repo_path, made.layer_name) == (Path(source.repo), source.layer_name)
    for value, match in (
        (f"{tmp_path / 'none'}:Norm", "There is no folder"),
        (str(kernel), "'/folder:LayerName'"),
        ((f"{kernel}:Norm", {"version": 1}), "A folder has one version"),
    ):
        with pytest.raises(ValueError, match=match):
            KernelConfig({"RMSNorm": value}, use_local_kernel=True)


def named(layer: str) -> str:
    return f"org/repo:{layer}"


@pytest.mark.parametrize("count", range(1, len(MODES) + 1))
def test_modes_are_looked_up_in_the_packages_order(count: int) -> None:
    """The best of the modes named wins, in the order that the package documents."""
    order = {
        "infer": ["INFERENCE", "INFERENCE|TORCH_COMPILE", "TRAINING", "TRAINING|TORCH_COMPILE", "FALLBACK"],
        "train": ["TRAINING", "TRAINING|TORCH_COMPILE", "FALLBACK"],
    }
    for mode, names in order.items():
        kept = order["infer"][-count:]
        rule = found({"cuda": {name: named(str(i)) for i, name in enumerate(kept)}}, problem(mode))
        expected = next(name for name in names if name in kept)
        assert isinstance(rule, Rule) and rule.mode == expected
        assert isinstance(rule.source, Source) and rule.source.layer_name == str(kept.index(expected))


def test_modes_are_the_packages_too() -> None:
    value = {
        Mode.TRAINING | Mode.TORCH_COMPILE: named("A"),
        Mode.INFERENCE: named("B"),
    }
    for form in (value, {"cuda": value}):
        modes = {mode: found(form, problem(mode)) for mode in ("infer", "train")}
        assert {m: r.source.layer_name for m, r in modes.items()} == {"infer": "B", "train": "A"}  # type: ignore[union-attr]
    assert found({"cuda": {Mode.INFERENCE: named("B")}}, problem("train")) == "mapped for INFERENCE only"


def test_devices_may_bound_the_capability() -> None:
    value = {
        "cuda": named("all"),
        Device("cuda", Bounds(min_capability=80, max_capability=90)): named("some"),
        Device("cuda", Bounds(min_capability=90, max_capability=90)): named("hopper"),
    }
    chosen = {}
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (12, 0)):
        rule = found(value, problem(capability=capability))
        chosen[capability] = rule.source.layer_name  # type: ignore[union-attr]
    assert chosen == {(7, 5): "all", (8, 0): "some", (8, 9): "some", (9, 0): "hopper", (12, 0): "all"}


def test_an_entry_without_device_counts_everywhere() -> None:
    for device, capability in (("cpu", None), ("cuda", (9, 0))):
        assert isinstance(found(named("A"), problem(device=device, capability=capability)), Rule)
    off = found({"cuda": ""}, problem())
    assert isinstance(off, Rule) and off.source is None


def test_a_repository_of_the_package_is_taken_as_it_is(tmp_path: Path) -> None:
    kernel = hub_layers.write_kernel(tmp_path / "kernel")
    repository = hub_layers.LocalLayerRepository(repo_path=kernel, layer_name="Norm")
    rule = found({"cuda": {Mode.INFERENCE: repository}}, problem())
    assert isinstance(rule, Rule) and rule.source is repository
