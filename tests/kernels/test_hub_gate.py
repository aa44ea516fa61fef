"""The gate lets right kernels through, in every dtype, and names what is wrong with the others."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cuformers.kernels.hub.adapters import adapt, contract_problem, plain
from cuformers.kernels.hub.capturing import capture_problem
from cuformers.kernels.hub.gate import LIMIT, BackwardMissing, check
from cuformers.kernels.hub.layers import LAYERS, Uses
from tests.hub_layers import LAYERS as CODE

USES = Uses(
    norms=((64, 1e-6), (24, 1e-5)),
    num_norms=3,
    plain_norms=True,
    activations=(("silu", 40), ("gelu_tanh", 24)),
    num_blocks=2,
    rotations=((4, 2, 16, 16), (3, 3, 24, 12)),
    num_rotated=2,
)
CPU = torch.device("cpu")
DTYPES = list(LIMIT)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("kernel") / "layers.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("_gate_layers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(cls: type[nn.Module], name: str, dtype: torch.dtype = torch.float32, mode: Any = "infer") -> float:
    layer = LAYERS[name]
    return check(adapt(cls, layer, mode), plain(layer), layer, USES, device=CPU, dtype=dtype, mode=mode)


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "cls"),
    [("RMSNorm", "Norm"), ("SiLU", "Silu"), ("GeluTanh", "GeluTanh"), ("SiluAndMul", "SiluAndMul"),
     ("rotary_pos_emb", "Rotary")],
)  # fmt: skip
def test_right_kernels_pass(name: str, cls: str, dtype: torch.dtype, mode: str, layers: Any) -> None:
    worst = judge(getattr(layers, cls), name, dtype, mode)
    assert 0 <= worst < 1 and (worst > 0 or dtype is torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "kind"), [("RMSNorm", "norm"), ("SiLU", "activation"), ("rotary_pos_emb", "rotary")])
def test_an_error_of_twice_the_limit_is_found(name: str, kind: str, dtype: torch.dtype) -> None:
    """In every value, as in a single one of the last row."""
    layer = LAYERS[name]

    def off(everywhere: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            out = plain(layer)(*(a.float() if isinstance(a, torch.Tensor) else a for a in args))
            first = out[0] if isinstance(out, tuple) else out
            scale = (first.abs() + first.square().mean().sqrt()) * 2.2 * LIMIT[dtype]
            worse = first + scale
            if not everywhere:
                worse = torch.cat((first.flatten()[:-1], worse.flatten()[-1:])).view_as(first)
            return (worse.to(dtype), out[1].to(dtype)) if isinstance(out, tuple) else worse.to(dtype)

        return call

    for everywhere in (True, False):
        with pytest.raises(ValueError, match=r"gives a wrong result on .* times the error allowed"):
            check(off(everywhere), plain(layer), layer, USES, device=CPU, dtype=dtype, mode="infer")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("cls", "match"),
    [
        ("NanNorm", r"wrong result on \[1, 64\] and \[64\].*: nan where .* inf times"),
        ("WideNorm", r"shape \(1, 64\) in torch\.float64 on"),
        ("FlatNorm", r"gives a result of shape \(64,\)|shape \(320,\)|shape \(192,\)"),
        ("WritingNorm", r"writes into its input \[1, 64\]"),
        ("CrashingNorm", r"fails on \[1, 64\] .*: RuntimeError: no kernel image is available"),
    ],
)
def test_wrong_kernels_are_named(cls: str, match: str, dtype: torch.dtype, layers: Any) -> None:
    with pytest.raises(ValueError, match=match):
        judge(getattr(layers, cls), "RMSNorm", dtype)


def test_a_rotation_the_wrong_way_round(layers: Any) -> None:
    with pytest.raises(ValueError, match=r"wrong result on \[1, 4, 16\] and \[1, 2, 16\]"):
        judge(layers.BackwardsRotary, "rotary_pos_emb")


def test_a_rotation_that_leaves_the_keys_out(layers: Any) -> None:
    class Queries(nn.Module):
        def forward(self, q, k, cos, sin, unsqueeze_dim=1):
            return layers.Rotary().forward(q, k, cos, sin)[0], k

    with pytest.raises(ValueError, match="wrong result"):
        judge(Queries, "rotary_pos_emb")


def test_only_one_of_the_models_shapes_is_wrong(layers: Any) -> None:
    class Narrow(nn.Module):
        def forward(self, x):
            return layers.normed(self, x) if x.shape[-1] == 64 else x

    with pytest.raises(ValueError, match=r"wrong result on \[1, 24\] and \[24\]"):
        judge(Narrow, "RMSNorm")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("epsilon", [0.0, 1e-5, 1e-4])
def test_epsilon_counts(epsilon: float, dtype: torch.dtype) -> None:
    """Only rows as small as epsilon show a kernel that has one of its own."""

    class OwnEpsilon(nn.Module):
        def forward(self, x):
            h = x.float()
            return self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)

    with pytest.raises(ValueError, match="wrong result"):
        judge(OwnEpsilon, "RMSNorm", dtype)


def test_gradients(layers: Any) -> None:
    assert judge(layers.WrongBackwardNorm, "RMSNorm") < 1
    with pytest.raises(ValueError, match=r"wrong gradient on \[1, 64\]"):
        judge(layers.WrongBackwardNorm, "RMSNorm", mode="train")
    for cls in (layers.InferenceNorm, layers.SilentNorm):
        with pytest.raises(BackwardMissing, match="gives no gradient"):
            judge(cls, "RMSNorm", mode="train")

    class WeightForgotten(nn.Module):
        def forward(self, x):
            return layers.normed(type("Module", (), {"weight": self.weight.detach(), "variance_epsilon": self.eps}), x)

    with pytest.raises(BackwardMissing):
        judge(WeightForgotten, "RMSNorm", mode="train")


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_where_it_is_called_does_not_matter(around: Any, layers: Any) -> None:
    for mode in ("infer", "train"):
        outside = judge(layers.Norm, "RMSNorm", mode=mode)
        with around():
            assert judge(layers.Norm, "RMSNorm", mode=mode) == outside


@pytest.mark.parametrize(
    ("cls", "name", "match"),
    [
        ("StatefulNorm", "RMSNorm", "has a constructor"),
        ("TwoTensorNorm", "RMSNorm", "does not take the layer's 1 tensors"),
        ("Norm", "rotary_pos_emb", "does not take the layer's 4 tensors"),
        ("no_class", "RMSNorm", "is no module class"),
        ("Norm", "RMSNorm", None),
        ("Rotary", "rotary_pos_emb", None),
    ],
)
def test_the_contract(cls: str, name: str, match: str | None, layers: Any) -> None:
    problem = contract_problem(getattr(layers, cls), LAYERS[name])
    assert problem is None if match is None else match in str(problem)


def test_stand_ins_are_modules_of_their_own(layers: Any) -> None:
    seen = []

    class Looking(nn.Module):
        def forward(self, x):
            seen.append((self, self.weight, self.training, list(self.parameters())))
            return x

    call = adapt(Looking, LAYERS["RMSNorm"], "train")
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    for weight in weights:
        call(torch.ones(2, 4), weight, 1e-5)
    assert [w for _, w, _, _ in seen] == weights and seen[0][0] is not seen[1][0]
    assert all(training and not parameters for _, _, training, parameters in seen)


def test_without_a_gpu_nothing_is_captured() -> None:
    layer = LAYERS["RMSNorm"]
    assert capture_problem(plain(layer), layer, USES, CPU, torch.float32) is None
