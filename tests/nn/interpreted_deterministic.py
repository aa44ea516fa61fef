"""A deterministic model in Triton's CPU interpreter. Run by test_deterministic.py in a process of its own.

NumPy's exponential of an element depends in its last bit on the element's place in the array, so what takes one is
compared with a small tolerance here and to the bit on a GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.auto.config import AutoConfig
from cuformers.engine.engine import Engine
from cuformers.engine.request import Request
from cuformers.kernels.op import Problem
from cuformers.kernels.table import select
from cuformers.nn.attention.deterministic import deterministic_backend
from cuformers.nn.kernel_module import set_kernels

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen2_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
}


def make(name: str, deterministic: bool = True) -> Any:
    """A model in float32 on the CPU; `set_deterministic` would refuse it there."""
    config = AutoConfig.for_model(name, **SIZES, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config, dtype="float32", device_map="cpu", seed=0)
    if deterministic:
        set_kernels(model, select(Problem(device="cuda", capability=(9, 0)), deterministic=True))
        model.__dict__["backend"] = deterministic_backend(None, model.attention_problem, model.ops.chunk_attention)
    return model


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_forward_gives_the_logits_of_the_reference_for_padded_rows(name: str) -> None:
    mask = torch.ones(3, 21, dtype=torch.long)
    mask[1, :9] = 0
    with torch.no_grad():
        found, expected = (make(name, on)(ids(3, 21), attention_mask=mask).logits for on in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_the_engine_give_the_log_probabilities_of_a_plain_forward(name: str) -> None:
    """Chunks of a prompt, a prompt from the cache, decoding rows beside chunks."""
    model = make(name)
    engine = Engine(model, max_batch_tokens=24)
    prompts = [ids(1, n)[0].tolist() for n in (70, 5, 70)]
    requests = [Request(prompt=p, max_new_tokens=3, logprobs=0) for p in prompts]
    engine.run(requests[:2])
    engine.run(requests[2:])
    assert requests[0].generated == requests[2].generated
    for request in requests:
        with torch.no_grad():
            logits = model(torch.tensor([request.context])).logits[0, len(request.prompt) - 1 : -1]
        expected = model.ops.logprobs(logits, torch.tensor(request.generated), 0).chosen
        assert logits.argmax(-1).tolist() == request.generated
        torch.testing.assert_close(torch.tensor(request.token_logprobs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_values_of_inference_and_the_gradients_of_the_reference(name: str) -> None:
    tokens = ids(2, 13)
    losses, gradients = [], []
    for on in (True, False):
        model = make(name, on)
        with torch.no_grad():
            alone = model(tokens).logits
        model.requires_grad_(True)
        output = model(tokens, labels=tokens)
        if on:
            torch.testing.assert_close(output.logits, alone, rtol=1e-5, atol=1e-5)
        output.loss.backward()
        losses.append(output.loss)
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    assert all(g is not None for g in gradients[0].values())
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
