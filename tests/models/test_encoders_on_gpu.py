"""Encoders on a GPU: kernels and every attention backend that can, against transformers in float32 on the CPU."""

import pytest
import torch
from torch import Tensor

from cuformers import AutoModel
from models import checkpoints
from models.checkpoints import tokens
from models.encoders import ENCODERS, load, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Relative error of all real positions together; a CPU has 6e-7, 2e-3 and 1.5e-2."""


def batch(side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths on both sides of the windows and of the kernels' 16 rows; tokens, mask and positions."""
    lengths = (1, 90, 20, 64)
    mask = torch.tensor([[1] * n + [0] * (90 - n) for n in lengths])
    mask = mask if side == "right" else mask.flip(1)
    return tokens(4, 90) * mask, mask, (mask.cumsum(1) - 1).clamp(min=0)


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.float().cpu() - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype, backend", [
    ("float32", "sdpa"), ("float32", "eager"), ("bfloat16", "sdpa"), ("bfloat16", "eager"), ("float16", "sdpa"),
    ("bfloat16", "flash_attention_2"),
])  # fmt: skip
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_hidden_states(name: str, dtype: str, backend: str, side: str) -> None:
    ids, mask, positions = batch(side)
    model = load(name, dtype=dtype, device_map="cuda", attn_implementation=backend)
    assert {c.op: c.implementation.name for c in model.kernels()}["layer_norm"] == "triton"
    ours = model(ids, attention_mask=mask)
    theirs = oracle(name)(ids, attention_mask=mask, position_ids=positions)
    assert error(ours.last_hidden_state, theirs.last_hidden_state * mask[..., None]) < TOLERANCE[dtype]
    if "pooler_output" in ours and side == "right":
        assert error(ours.pooler_output, theirs.pooler_output) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_gradients(name: str) -> None:
    """In training the references compute; a differentiated model in eval mode gives the same gradients."""
    ids, mask, positions = batch("right")
    theirs = oracle(name)
    trained, evaluated = load(name, device_map="cuda").train(), load(name, device_map="cuda")
    for model in (trained, evaluated):
        model(ids, attention_mask=mask).last_hidden_state.square().sum().backward()
    expected = torch.autograd.grad(
        (theirs(ids, attention_mask=mask, position_ids=positions).last_hidden_state * mask[..., None]).square().sum(),
        list(theirs.parameters()),
        allow_unused=True,
    )
    for (parameter, _), grad in zip(theirs.named_parameters(), expected):
        if grad is None or parameter.endswith("key.bias"):  # a key's bias has no gradient but rounding
            continue
        for model in (trained, evaluated):
            found = model.get_parameter(parameter).grad
            assert found is not None and error(found, grad) < 1e-3, parameter


@torch.no_grad()
def test_a_decoder_without_its_head() -> None:
    ids, mask, positions = batch("left")
    theirs = checkpoints.oracle("qwen3").model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    for dtype in ("float32", "bfloat16"):
        model = AutoModel.from_pretrained(checkpoints.folder("qwen3"), dtype=dtype, device_map="cuda", progress=False)
        assert error(model(ids, attention_mask=mask).last_hidden_state, theirs * mask[..., None]) < TOLERANCE[dtype]


@torch.no_grad()
def test_layers_streamed_from_the_cpu() -> None:
    ids, mask, _ = batch("right")
    whole = load("bert", device_map="cuda")(ids, attention_mask=mask)
    names = {"embeddings": 0, "encoder.layer.0": 0, "encoder.layer.1": "cpu", "encoder.layer.2": "cpu",
             "encoder.layer.3": 0, "pooler": 0}  # fmt: skip
    spread = load("bert", device_map=names)
    assert spread.hf_device_map["encoder.layer.1"] == "cpu"
    out = spread(ids, attention_mask=mask)
    torch.testing.assert_close(out.last_hidden_state, whole.last_hidden_state)
    torch.testing.assert_close(out.pooler_output, whole.pooler_output)


