"""Attention sinks: the formula, and the same numbers from a plain forward and from the engine's steps."""

from dataclasses import replace

import pytest
import torch

from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.auto.config import AutoConfig
from cuformers.auto.model import PreTrainedModel
from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.attention.block import Attention
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.step import full_step


def plain() -> PreTrainedModel:
    """A tiny Llama."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config, dtype="float32", device_map="cpu", seed=0)


def with_sinks(window: int | None = None) -> PreTrainedModel:
    """A tiny Llama whose attention has sinks, and in every other layer a window."""
    model = plain()
    for index, layer in enumerate(model.model.layers):
        old = layer.self_attn
        spec = replace(old.spec, sinks=True, window=window if index % 2 else None)
        new = Attention(spec, model.config.hidden_size)
        new.load_state_dict({**old.state_dict(), "sinks": torch.linspace(-1.0, 2.0, spec.num_heads)})
        layer.self_attn = new
    model.settle()
    return model.eval()


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_takes_its_share_and_has_no_value(window: int | None) -> None:
    q, k, v, sinks = (torch.randn(*shape, dtype=torch.float64) for shape in ((7, 4, 8), (7, 2, 8), (7, 2, 8), (4,)))
    spec = AttentionSpec(layer=0, num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3, window=window, sinks=True)
    step = full_step(torch.arange(7), (7,), EagerAttention())
    out = EagerAttention().forward(q, k, v, spec, step, sinks)
    for i in range(7):
        for h in range(4):
            first = 0 if window is None else max(0, i - window + 1)
            weight = (k[first : i + 1, h // 2] @ q[i, h] * 0.3).exp()
            expected = weight @ v[first : i + 1, h // 2] / (weight.sum() + sinks[h].exp())
            torch.testing.assert_close(out[i, h], expected)


@pytest.mark.parametrize("window", [None, 4])
def test_generation_and_a_plain_forward_agree(window: int | None) -> None:
    model = with_sinks(window)
    ids = torch.arange(3, 21).view(2, 9)
    for attention in (None, "eager"):  # prompts by the op that reads the cache, and by the backend
        model.set_attn_implementation(attention)
        answer = model.generate(
            ids, max_new_tokens=6, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
        )
        with torch.no_grad():
            logits = model(answer.sequences[:, :-1]).logits[:, -6:]
        torch.testing.assert_close(torch.stack(answer.logits, 1), logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(answer.sequences[:, 9:], logits.argmax(-1))


def test_sinks_learn_and_matter() -> None:
    model, ids = with_sinks(), torch.arange(3, 21).view(2, 9)
    assert model.attn_implementation == "eager"
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    grads = [layer.self_attn.sinks.grad for layer in model.model.layers]
    assert all(grad is not None and grad.abs().min() > 0 for grad in grads)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
        assert (plain()(ids, labels=ids).loss - loss).abs() > 1e-4
        torch.testing.assert_close(model(ids).logits, plain()(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_backend_without_sinks_says_so() -> None:
    with pytest.raises(ValueError, match=r"'sdpa' is not possible here: sdpa has no sinks.*Possible here: .*'eager'"):
        with_sinks().set_attn_implementation("sdpa")


def test_new_weights_have_sinks_of_their_own() -> None:
    from cuformers.auto.causal_lm import _initializer

    spec = AttentionSpec(layer=0, num_heads=64, num_kv_heads=2, head_dim=8, scale=0.3, sinks=True)
    block = Attention(spec, 16)
    with torch.no_grad():
        _initializer(0.02)("self_attn", block, torch.Generator().manual_seed(0))
    assert block.sinks is not None and 0.01 < block.sinks.std() < 0.03
