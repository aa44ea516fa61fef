"""Models with layers from the Kernel Hub: that they really run, are right, stay with their model, and go again."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from cuformers import AutoConfig, AutoModelForCausalLM, KernelConfig
from cuformers.auto.model import PreTrainedModel
from tests.hub_layers import LAYERS, PACKAGES, calls, install, write_kernel
from tests.models.families import COMMON, FAMILIES

torch.set_num_threads(1)
IDS = torch.tensor([[5, 9, 23, 7, 40, 11, 3]])
ALL = {"RMSNorm": "Norm", "SiLU": "Silu", "rotary_pos_emb": "Rotary"}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch, request.param)


@pytest.fixture
def folder(tmp_path: Path, package: Any) -> Path:
    return write_kernel(tmp_path / "kernel")


def model_of(name: str = "llama", **options: Any) -> PreTrainedModel:
    family = FAMILIES[name]
    model_type = {"LlamaConfig": "llama", "Qwen3Config": "qwen3", "Phi3Config": "phi3", "Olmo2Config": "olmo2"}.get(
        family.config, "gemma2"
    )
    config = AutoConfig.for_model(model_type, **{**COMMON, **family.options, **options})
    return AutoModelForCausalLM.from_config(config, dtype="float32", device_map="cpu", seed=0)


def local(folder: Path, **layers: str) -> KernelConfig:
    return KernelConfig({name: f"{folder}:{layer}" for name, layer in layers.items()}, use_local_kernel=True)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def names_of(model: PreTrainedModel) -> dict[str, str]:
    return {choice.op: choice.implementation.name for choice in model.kernels()}


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "phi3", "phi3-partial-window", "llama-mha-untied-biases"])
def test_every_norm_is_the_hubs(name: str, folder: Path) -> None:
    model = model_of(name)
    plain = logits(model)
    tokens = model.generate(IDS, max_new_tokens=6, do_sample=False)
    model.set_use_kernels(True, local(folder, RMSNorm="Norm"))
    calls(folder)
    torch.testing.assert_close(logits(model), plain, **CLOSE)
    norms = [m for m in model.modules() if type(m).__name__ == "RMSNorm"]
    made = calls(folder)
    assert len(made) == len(norms) >= 9 and {call[0] for call in made} == {"Norm"}
    assert sorted({shape[-1] for _, shape, _ in made}) == sorted({norm.weight.numel() for norm in norms})
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), tokens)
    assert len(calls(folder)) == 6 * len(norms)  # a prompt's step and five of one token


def test_models_are_independent_and_get_their_own_bits_back(folder: Path) -> None:
    one, other = model_of(), model_of()
    before, tokens = logits(one), one.generate(IDS, max_new_tokens=5, do_sample=False)
    other_ops, own_ops = other.ops, one.ops
    one.set_use_kernels(True, local(folder, **ALL))
    assert one.use_kernels and not other.use_kernels and other.ops is other_ops
    calls(folder)
    assert torch.equal(logits(other), before) and calls(folder) == []
    logits(one)
    assert {name for name, _, _ in calls(folder)} == {"Norm", "Silu", "Rotary"}
    one.set_use_kernels(False)
    assert not one.use_kernels and one.ops is own_ops
    assert torch.equal(logits(one), before)
    assert torch.equal(one.generate(IDS, max_new_tokens=5, do_sample=False), tokens)
    assert calls(folder) == []
    one.use_kernels = True  # the layers named last
    assert names_of(one)["rms_norm"] == f"{folder}:Norm"


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [
        ({"SiLU": "Silu"}, {}, {("Silu", 96)}),
        ({"SiluAndMul": "SiluAndMul"}, {}, {("SiluAndMul", 192)}),
        ({"GeLU": "Gelu"}, {"hidden_act": "gelu"}, {("Gelu", 96)}),
        ({"GeluTanh": "GeluTanh"}, {"hidden_act": "gelu_pytorch_tanh"}, {("GeluTanh", 96)}),
        ({"NewGELU": "GeluTanh"}, {"hidden_act": "gelu_new"}, {("GeluTanh", 96)}),
        ({"rotary_pos_emb": "Rotary"}, {}, {("Rotary", 16)}),
        (ALL, {}, {("Norm", 64), ("Silu", 96), ("Rotary", 16)}),
    ],
)
def test_layers_of_every_kind(layers: dict[str, str], options: dict[str, Any], expected: set, folder: Path) -> None:
    model = model_of(**options)
    plain, tokens = logits(model), model.generate(IDS, max_new_tokens=5, do_sample=False)
    model.set_use_kernels(True, local(folder, **layers))
    calls(folder)
    torch.testing.assert_close(logits(model), plain, **CLOSE)
    assert {(name, shape[-1]) for name, shape, _ in calls(folder)} == expected
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), tokens)
    assert {name for name, _, _ in calls(folder)} == {name for name, _ in expected}


def test_partial_rotation_and_head_norms(folder: Path) -> None:
    for name, rotated in (("phi3-partial-window", 8), ("qwen3", 32)):
        model = model_of(name)
        plain, tokens = logits(model), model.generate(IDS, max_new_tokens=5, do_sample=False)
        model.set_use_kernels(True, local(folder, rotary_pos_emb="Rotary"))
        calls(folder)
        torch.testing.assert_close(logits(model), plain, **CLOSE)
        assert {shape[-1] for _, shape, _ in calls(folder)} == {rotated}
        assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), tokens)


def test_modes_choose_their_own_kernel(folder: Path) -> None:
    mapping = {"RMSNorm": {"cpu": {"INFERENCE": f"{folder}:InferenceNorm", "TRAINING": f"{folder}:Norm"}}}
    model = model_of()
    model.set_use_kernels(True, KernelConfig(mapping, use_local_kernel=True))
    for _ in range(2):
        calls(folder)
        logits(model.eval())
        assert {call[0] for call in calls(folder)} == {"InferenceNorm"}
        ops = model.ops
        model.train()
        calls(folder)
        model(IDS, labels=IDS).loss.backward()
        made = calls(folder)
        assert {(name, training) for name, _, training in made} == {("Norm", True)} and len(made) == 9
        assert model.eval().ops is ops  # so that captured steps stay


def test_gradients_of_a_hub_layer_are_right(folder: Path) -> None:
    plain, hub = model_of().train(), model_of().train()
    hub.set_use_kernels(True, local(folder, **ALL))
    calls(folder)
    losses = [model(IDS, labels=IDS).loss for model in (plain, hub)]
    for loss in losses:
        loss.backward()
    assert {call[0] for call in calls(folder)} == {"Norm", "Silu", "Rotary"}
    torch.testing.assert_close(losses[1], losses[0], **CLOSE)
    for (name, a), b in zip(plain.named_parameters(), hub.parameters()):
        assert a.grad is not None and a.grad.abs().max() > 0, name
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "phi3"])
def test_a_backward_pass_may_write_over_its_gradient(name: str, folder: Path) -> None:
    """Nobody else reads it: the residual stream has a gradient of its own."""
    plain, hub = model_of(name).train(), model_of(name).train()
    hub.set_use_kernels(True, local(folder, RMSNorm="InPlaceBackwardNorm"))
    for model in (plain, hub):
        model(IDS, labels=IDS).loss.backward()
    for (parameter, a), b in zip(plain.named_parameters(), hub.parameters()):
        assert a.grad is not None
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-5, msg=parameter)


@pytest.mark.parametrize("layer", ["InferenceNorm", "SilentNorm"])
def test_without_a_backward_pass_training_keeps_ours(layer: str, folder: Path, capsys: Any) -> None:
    model = model_of()
    own = model.train().ops
    model.eval().set_use_kernels(True, local(folder, RMSNorm=layer))
    assert names_of(model)["rms_norm"] == f"{folder}:{layer}"
    model.train()
    assert names_of(model) == {choice.op: choice.implementation.name for choice in own.choices}
    refused = {choice.op: choice.refused.get(f"{folder}:{layer}") for choice in model.kernels()}
    why = "has no backward pass" if layer == "InferenceNorm" else "gives no gradient"
    assert refused["rms_norm"] == refused["linear"] == why and refused["argmax"] is None
    assert f"RMSNorm keeps our own kernels: {folder}:{layer} {why}." in capsys.readouterr().err
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_gradient_in_evaluation_comes_from_ours(folder: Path) -> None:
    model = model_of()
    model(IDS, labels=IDS).loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    model.set_use_kernels(True, local(folder, RMSNorm="InferenceNorm"))
    calls(folder)
    model(IDS, labels=IDS).loss.backward()
    assert calls(folder) == []
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-4, atol=1e-6)


def test_one_layer_switched_off(folder: Path) -> None:
    model = model_of()
    plain = logits(model)
    model.set_use_kernels(True, KernelConfig({"RMSNorm": "", "SiLU": f"{folder}:Silu"}, use_local_kernel=True))
    torch.testing.assert_close(logits(model), plain, **CLOSE)
    (choice,) = (choice for choice in model.kernels() if choice.op == "rms_norm")
    assert choice.implementation.name == "reference" and choice.why == "RMSNorm: switched off in kernel_config"
    assert "reference" not in choice.refused
    assert names_of(model)["gated_activation"] == f"{folder}:Silu"


def test_a_wrong_kernel_is_refused_and_changes_nothing(folder: Path) -> None:
    model = model_of()
    before, ops = logits(model), model.ops
    with pytest.raises(ValueError, match=r"WrongNorm for RMSNorm gives a wrong result on \[1, 64\] and \[64\]"):
        model.set_use_kernels(True, local(folder, RMSNorm="WrongNorm"))
    assert model.ops is ops and not model.use_kernels and model.kernel_config is None
    assert torch.equal(logits(model), before)
    model.set_use_kernels(True, local(folder, RMSNorm="WrongBackwardNorm"))  # right in inference
    ops = model.ops
    with pytest.raises(ValueError, match=r"WrongBackwardNorm for RMSNorm gives a wrong gradient .* times the error"):
        model.train()
    assert not model.training and not model.lm_head.training and model.ops is ops


def test_the_choice_is_listed(folder: Path, capsys: Any) -> None:
    model = model_of()
    model.set_use_kernels(True, local(folder, RMSNorm="Norm"))
    rows = {choice.op: choice for choice in model.kernels()}
    norm, linear = rows["rms_norm"], rows["linear"]
    assert norm.implementation.name == f"{folder}:Norm" and norm.mode == "infer"
    assert norm.why.startswith("RMSNorm: kernel_config; 9 modules; error ")
    assert norm.refused["reference"] == "kernel_config names another for RMSNorm"
    assert (linear.implementation.name, linear.why) == ("reference", f"RMSNorm is taken out of it: {folder}:Norm")
    assert rows["argmax"].why == ""
    assert f"RMSNorm of 9 modules is computed by {folder}:Norm." in capsys.readouterr().err


def test_a_mapping_for_other_devices_is_said(capsys: Any) -> None:
    model = model_of()
    ops = model.ops
    model.set_use_kernels(True, KernelConfig({"RMSNorm": {"cuda": "kernels-community/liger-kernels:LigerRMSNorm"}}))
    name = "kernels-community/liger-kernels@v1:LigerRMSNorm"
    assert f"{name} mapped for cuda only, the model is on cpu" in capsys.readouterr().err
    assert all(a.function is b.function for a, b in zip(model.kernels(), ops.choices))
    (choice,) = (choice for choice in model.kernels() if choice.op == "rms_norm")
    assert choice.refused[name] == "mapped for cuda only, the model is on cpu"


def test_use_kernels_alone_is_ours(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuformers.base import log

    monkeypatch.setattr(log, "_said", set())
    model = model_of()
    ops = model.ops
    model.set_use_kernels(True)
    assert model.use_kernels and model.ops is ops
    assert capsys.readouterr().err.count("nothing is taken from the hub unless kernel_config names it") == 1


def test_models_without_the_layer_say_so(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"layer of kernel_config='RMSNorm'.*Here its norms multiply by 1 \+ weight"):
        model_of("gemma2").set_use_kernels(True, local(folder, RMSNorm="Norm"))
    with pytest.raises(ValueError, match=r"layer of kernel_config='GeLU'.*Here its activation is silu"):
        model_of().set_use_kernels(True, local(folder, GeLU="Gelu"))


def test_two_layers_for_one_thing(folder: Path) -> None:
    with pytest.raises(ValueError, match="one layer for silu"):
        model_of().set_use_kernels(True, local(folder, SiLU="Silu", SiluAndMul="SiluAndMul"))


def test_arguments(folder: Path, package: Any) -> None:
    model = model_of()
    config = local(folder, RMSNorm="Norm")
    for arguments, match in (
        ((1,), "use_kernels=1"),
        ((True, {"RMSNorm": "a/b:C"}), "kernel_config=.*a KernelConfig"),
        ((False, config), "None with use_kernels=False"),
        ((True, config, package.Mode.TRAINING), r"Mode\.INFERENCE, the model's own"),
        ((True, config, package.Mode.INFERENCE | package.Mode.TORCH_COMPILE), r"torch\.compile"),
    ):
        with pytest.raises(ValueError, match=match):
            model.set_use_kernels(*arguments)
        assert not model.use_kernels
    model.set_use_kernels(True, config, package.Mode.INFERENCE)
    assert names_of(model)["rms_norm"] == f"{folder}:Norm"


def test_the_engine_begins_anew(folder: Path) -> None:
    model = model_of()
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    runner = model.engine.runner
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert model.engine.runner is runner and runner is not None
    model.set_use_kernels(True, local(folder, RMSNorm="Norm"))
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    hub = model.engine.runner
    assert hub is not None and hub is not runner
    model.train().eval()
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert model.engine.runner is hub


def test_a_move_keeps_the_layers(folder: Path) -> None:
    model = model_of()
    model.set_use_kernels(True, local(folder, RMSNorm="Norm"))
    model.to(torch.bfloat16)
    assert names_of(model)["rms_norm"] == f"{folder}:Norm" and logits(model).dtype is torch.bfloat16


def test_the_environment_switches_them_off(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("USE_HUB_KERNELS", "0")
    model = model_of()
    ops = model.ops
    model.set_use_kernels(True, local(folder, RMSNorm="Norm"))
    assert model.ops is ops and "USE_HUB_KERNELS is off" in capsys.readouterr().err


def test_a_copy_has_the_layers_and_goes_its_own_way(folder: Path) -> None:
    model = model_of()
    plain = logits(model)
    model.set_use_kernels(True, local(folder, RMSNorm="Norm"))
    twin = copy.deepcopy(model)
    model.set_use_kernels(False)
    calls(folder)
    assert torch.equal(logits(model), plain) and calls(folder) == []
    assert twin.use_kernels and torch.allclose(logits(twin), plain, **CLOSE) and len(calls(folder)) == 9
    twin.train().eval()
    assert names_of(twin)["rms_norm"] == f"{folder}:Norm"


def test_a_mode_that_is_named_must_be_possible(folder: Path) -> None:
    model = model_of()
    mapping = {"RMSNorm": {"TRAINING": f"{folder}:SilentNorm", "INFERENCE": f"{folder}:Norm"}}
    model.set_use_kernels(True, KernelConfig(mapping, use_local_kernel=True))
    with pytest.raises(ValueError, match=r"SilentNorm is mapped for TRAINING of RMSNorm, and gives no gradient"):
        model.train()
    assert not model.training and names_of(model)["rms_norm"] == f"{folder}:Norm"


def test_a_move_to_where_the_kernel_fails_leaves_a_model_that_works(tmp_path: Path, package: Any) -> None:
    code = f"{LAYERS}\n\nclass OnlyFloat32(Norm):\n    def forward(self, x):\n"
    code += "        assert x.dtype == torch.float32\n        return normed(self, x)\n"
    model = model_of()
    model.set_use_kernels(True, local(write_kernel(tmp_path / "kernel", code), RMSNorm="OnlyFloat32"))
    with pytest.raises(ValueError, match=r"OnlyFloat32 for RMSNorm fails on \[1, 64\] .* bfloat16: AssertionError"):
        model.to(torch.bfloat16)
    assert not model.use_kernels and set(names_of(model).values()) == {"reference"}
    assert logits(model).dtype is torch.bfloat16


def test_determinism_rules_them_out(folder: Path) -> None:
    model = model_of()
    model.set_use_kernels(True, local(folder, RMSNorm="Norm"))
    with pytest.raises(ValueError, match="set_use_kernels\\(False\\) comes first"):
        model.set_deterministic()


def test_from_pretrained_and_from_config(folder: Path, tmp_path: Path, capsys: Any) -> None:
    model_of().save_pretrained(tmp_path / "model")
    config = local(folder, RMSNorm="Norm")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map="cpu", kernel_config=config)
    assert loaded.use_kernels and names_of(loaded)["rms_norm"] == f"{folder}:Norm"
    assert "kernel_config is given, so use_kernels=True" in capsys.readouterr().err
    made = AutoModelForCausalLM.from_config(loaded.config, device_map="cpu", use_kernels=True, kernel_config=config)
    assert made.kernel_config == config and names_of(made)["rms_norm"] == f"{folder}:Norm"
