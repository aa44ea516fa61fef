"""Hub layers on a GPU: a Triton kernel of somebody's in captured steps, and one that no graph can hold."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cuformers import AutoConfig, AutoModelForCausalLM, KernelConfig
from cuformers.auto.model import PreTrainedModel
from tests.hub_layers import LAYERS, install, write_kernel
from tests.models.families import COMMON

pytestmark = pytest.mark.gpu
IDS = torch.arange(3, 15)[None]
CLOSE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
"""Greatest ||logits - ours|| / ||ours||: some three times what plain torch layers give on a CPU."""
TRITON = '''

import triton
import triton.language as tl


@triton.jit
def norm_kernel(X, W, Y, H, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * H + cols, cols < H, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x) / H + eps)
    w = tl.load(W + cols, cols < H, other=0.0).to(tl.float32)
    tl.store(Y + row * H + cols, (x * scale * w).to(Y.dtype.element_ty), cols < H)


class TritonNorm(nn.Module):
    has_backward = False

    def forward(self, hidden_states):
        x = hidden_states.contiguous()
        y = torch.empty_like(x)
        width = x.shape[-1]
        norm_kernel[(x.numel() // width,)](
            x, self.weight, y, width, self.variance_epsilon, BLOCK=triton.next_power_of_2(width)
        )
        return y


class WaitingNorm(nn.Module):
    def forward(self, hidden_states):
        assert hidden_states.abs().max().item() >= 0
        return normed(self, hidden_states)


class FrozenNorm(nn.Module):
    """Bakes a number of its first input into the graph."""

    def forward(self, hidden_states):
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros_like(hidden_states)
        return normed(self, hidden_states)
'''


@pytest.fixture(params=["stand-in", "installed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(monkeypatch, request.param)
    return write_kernel(tmp_path / "kernel", LAYERS + TRITON)


def model_of(dtype: str = "bfloat16", **options: Any) -> PreTrainedModel:
    config = AutoConfig.for_model("qwen3", **{**COMMON, "head_dim": 64, **options})
    return AutoModelForCausalLM.from_config(config, dtype=dtype, device_map="cuda", seed=0)


def local(folder: Path, **layers: str) -> KernelConfig:
    mapping = {name: {"cuda": f"{folder}:{layer}"} for name, layer in layers.items()}
    return KernelConfig(mapping, use_local_kernel=True)


def generate(model: PreTrainedModel) -> list[list[int]]:
    for _ in range(2):  # the second time from graphs
        tokens = model.generate(IDS.cuda(), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokens.tolist()


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS.cuda()).logits


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    "layers",
    [
        {"RMSNorm": "TritonNorm"},
        {"SiLU": "Silu"},
        {"SiluAndMul": "SiluAndMul"},
        {"rotary_pos_emb": "Rotary"},
        {"RMSNorm": "TritonNorm", "SiluAndMul": "SiluAndMul", "rotary_pos_emb": "Rotary"},
    ],
    ids="-".join,
)
def test_layers_in_captured_steps(layers: dict[str, str], dtype: str, folder: Path) -> None:
    model = model_of(dtype)
    plain, tokens = logits(model), generate(model)
    assert model.engine.captures
    model.set_use_kernels(True, local(folder, **layers))
    assert (logits(model) - plain).float().norm() <= CLOSE[dtype] * plain.float().norm()
    served = generate(model)
    assert model.engine.captures and model.engine.runner is not None and model.engine.runner.captures > 0
    if dtype == "float32":
        assert served == tokens
    again = generate(model)
    assert again == served
    model.set_use_kernels(False)
    assert torch.equal(logits(model), plain) and generate(model) == tokens


@pytest.mark.parametrize(
    ("layer", "match"),
    [("WaitingNorm", "a CUDA graph can't hold it"), ("FrozenNorm", "in a CUDA graph is another one")],
)
def test_what_no_graph_can_hold_runs_without(layer: str, match: str, folder: Path, capsys: Any) -> None:
    model = model_of("float32")
    tokens = generate(model)
    model.set_use_kernels(True, local(folder, RMSNorm=layer))
    assert match in capsys.readouterr().err
    assert not model.engine.captures and generate(model) == tokens
    model.set_use_kernels(False)
    assert model.engine.captures and generate(model) == tokens  # a refused capture leaves the GPU usable


def test_training_keeps_its_gradients(folder: Path) -> None:
    model = model_of("float32").train()
    model(IDS.cuda(), labels=IDS.cuda()).loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    model.set_use_kernels(True, local(folder, RMSNorm="Norm", SiLU="Silu", rotary_pos_emb="Rotary"))
    model(IDS.cuda(), labels=IDS.cuda()).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-2, atol=1e-4)
    model.zero_grad()
    model.eval().set_use_kernels(True, local(folder, RMSNorm="TritonNorm"))
    model.train()  # it has no backward pass
    model(IDS.cuda(), labels=IDS.cuda()).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_move_to_the_gpu_checks_anew(folder: Path) -> None:
    config = AutoConfig.for_model("qwen3", **COMMON)
    model = AutoModelForCausalLM.from_config(config, dtype="float32", device_map="cpu", seed=0)
    model.set_use_kernels(True, local(folder, RMSNorm="TritonNorm"))
    names = {choice.op: choice.implementation.name for choice in model.kernels()}
    assert names["rms_norm"] == "reference"
    model.cuda()
    names = {choice.op: choice.implementation.name for choice in model.kernels()}
    assert names["rms_norm"] == f"{folder}:TritonNorm" and "kernels" in sys.modules
