"""Attention functions of the user's own: those of Transformers serve as examples, and give Transformers' numbers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cuformers import AttentionInterface, AttentionMaskInterface
from cuformers.nn.attention.choose import BACKENDS, choose_backend
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.attention.registered import TAKEN
from tests.models.checkpoints import load, oracle, tokens
from tests.nn.attention_matrix import RAGGED, SQUARE, Shape, inputs, results

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def names_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionInterface, "known", {})
    monkeypatch.setattr(AttentionMaskInterface, "known", {})


@pytest.fixture(params=["sdpa", "eager"])
def theirs(request: pytest.FixtureRequest) -> Iterator[str]:
    """Transformers' functions under names of ours."""
    from transformers import masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    def sdpa(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    function, mask = {
        "sdpa": (sdpa, masking_utils.sdpa_mask), "eager": (eager_attention_forward, masking_utils.eager_mask)
    }[request.param]  # fmt: skip
    name = f"their_{request.param}"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)
    yield name


@pytest.mark.parametrize("lengths", [RAGGED, SQUARE, (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 6])
def test_functions_of_transformers(theirs: str, lengths: tuple[int, ...], window: int | None) -> None:
    shape = Shape(lengths, head_dim=16, window=window)
    backend = choose_backend(theirs, shape.problem(torch.float32, CPU, train=True))
    x = inputs(shape, torch.float32).to(torch.float32, CPU)
    expected, found = (results(b, shape, x, train=True) for b in (EagerAttention(), backend))
    for what, tensor in found.items():
        torch.testing.assert_close(tensor, expected[what], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2"])
def test_a_model_with_a_registered_function(theirs: str, name: str) -> None:
    if name == "gemma2" and theirs == "their_sdpa":
        with pytest.raises(ValueError, match="their_sdpa has no softcap: its signature does not name softcap"):
            load(name, attn_implementation=theirs)
        return
    model, ids = load(name, attn_implementation=theirs), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        ours = model(ids, attention_mask=mask).logits
        expected = oracle(name)(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(ours[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
    assert model.attn_implementation == theirs
    answer = model.generate(ids, max_new_tokens=5, do_sample=False)
    model.set_attn_implementation("eager")
    assert torch.equal(answer, model.generate(ids, max_new_tokens=5, do_sample=False))


def causal(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=kwargs["scaling"], is_causal=module.is_causal, enable_gqa=True
    )
    return out.transpose(1, 2), None


def test_without_a_mask_function_there_is_no_mask() -> None:
    seen: list[Any] = []

    def spying(module, query, key, value, attention_mask, **kwargs):
        seen.append((attention_mask, kwargs, module))
        return causal(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("spying", spying)
    shape = Shape((7, 7), head_dim=16)
    backend = choose_backend("spying", shape.problem(torch.float32, CPU, train=False))
    results(backend, shape, inputs(shape, torch.float32).to(torch.float32, CPU), train=False)
    mask, kwargs, module = seen[0]
    assert len(seen) == 1 and mask is None and kwargs == {"scaling": shape.spec.scale, "dropout": 0.0}
    assert (module.layer_idx, module.num_key_value_groups, module.is_causal, module.training) == (0, 2, True, False)
    with pytest.raises(ValueError, match="spying has no window: its signature does not name sliding_window"):
        choose_backend("spying", Shape((7,), window=3).problem(torch.float32, CPU, train=False))


def test_what_a_layer_asks_is_told_by_name() -> None:
    told: dict[str, Any] = {}

    def attend(module, query, key, value, attention_mask, sliding_window=None, softcap=None, s_aux=None, **kwargs):
        told.update(sliding_window=sliding_window, softcap=softcap, s_aux=s_aux)
        return query.transpose(1, 2)

    AttentionInterface.register("told", attend)
    shape = Shape((7,), head_dim=16, window=3, softcap=2.0, sinks=True)
    backend = choose_backend("told", shape.problem(torch.float32, CPU, train=False))
    x = inputs(shape, torch.float32).to(torch.float32, CPU)
    results(backend, shape, x, train=False)
    assert told == {"sliding_window": 3, "softcap": 2.0, "s_aux": x.sinks}


@pytest.mark.parametrize("function, says", [
    (lambda module, query, key, value: query, "can't be called as .*too many positional"),
    (lambda module, query, key, value, attention_mask: query, "can't be called as .*scaling"),
], ids=["four", "no scaling"])  # fmt: skip
def test_a_function_that_can_not_be_called_is_found_at_load(function: Any, says: str) -> None:
    AttentionInterface.register("short", function)
    with pytest.raises(ValueError, match=says):
        load("llama", attn_implementation="short")


def test_a_wrong_shape_is_said() -> None:
    AttentionInterface.register("wrong", lambda *args, **kwargs: (args[1], None))
    with pytest.raises(ValueError, match=r"'wrong' must return a tensor \(1, 6, 4, 16\), got \(1, 4, 6, 16\)"):
        load("llama", attn_implementation="wrong")(tokens(1, 6))


@pytest.mark.parametrize("name, function", [
    ("", causal), ("a/b", causal), ("paged|x", causal), (3, causal), ("fine", None), ("sdpa", causal)
])  # fmt: skip
def test_what_can_not_be_registered(name: Any, function: Any) -> None:
    with pytest.raises(ValueError, match="is not possible"):
        AttentionInterface.register(name, function)


def test_names_of_ours_stay_ours() -> None:
    assert set(TAKEN) == {*BACKENDS, "deterministic"}


def test_a_name_is_listed_and_given_anew() -> None:
    AttentionInterface.register("mine", lambda *args, **kwargs: None)
    AttentionInterface.register("mine", causal)
    problem = Shape((3,)).problem(torch.float32, CPU, train=False)
    assert choose_backend("paged|mine", problem).name == "mine"
    with pytest.raises(ValueError, match=r"unknown.*'mine'"):
        choose_backend("yours", problem)
