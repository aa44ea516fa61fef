"""What a model with adapters computes, against W + scaling * B A."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from models.checkpoints import load, oracle, shared, tokens
from torch import Tensor
from torch.nn.functional import cross_entropy

from adapters.lora import FAMILIES, IDS, adapted, factors, fill, formula
from cuformers import ContinuousBatchingConfig, GenerationConfig, LoraConfig, get_peft_model
from cuformers.adapters.layer import LoraLinear, lora_layers
from cuformers.engine.capacity import PAGE_SIZE
from cuformers.kernels.table import reference
from cuformers.nn.kernel_module import set_kernels

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def off(logits: Tensor, exact: Tensor) -> float:
    """Relative error over all."""
    return ((logits.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_the_formulas(family: str) -> None:
    model = adapted(family)
    leaves = [t for pair in factors(model).values() for t in pair]
    model.train()
    logits = model(IDS).logits
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad((logits * weight).sum(), leaves)
    expected = formula(family, 1.5, factors(model))
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(IDS).logits, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("options, scaling", [
    ({"target_modules": ["q_proj"]}, 0.5),
    ({"target_modules": ["k_proj", "down_proj"], "use_rslora": True}, 1.0),
    ({"target_modules": r".*\.0\.mlp\.(gate|up)_proj"}, 0.5),
    ({"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj"]}, 0.5),
    ({"target_modules": ["v_proj", "o_proj"], "layers_to_transform": 1}, 0.5),
    ({"target_modules": ["up_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}, 0.5),
    ({"target_modules": ["lm_head"]}, 0.5),
    ({}, 0.5),
])  # fmt: skip
@torch.no_grad()
def test_some_leaves_of_a_product(options: dict, scaling: float) -> None:
    config = LoraConfig(r=4, lora_alpha=2, **options)
    model = adapted("llama", config)
    expected = formula("llama", scaling, factors(model))
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(expected, oracle("llama")(IDS).logits, atol=1e-2)


def test_what_is_adapted() -> None:
    def paths(**options: object) -> set[str]:
        model = load("llama")
        model.add_adapter(LoraConfig(**options))  # type: ignore[arg-type]
        return set(lora_layers(model))

    everything = paths(target_modules="all-linear")
    assert len(everything) == 7 * shared("llama").config.num_hidden_layers and "lm_head" not in everything
    assert paths() == {p for p in everything if p.endswith(("q_proj", "v_proj"))}
    assert paths(target_modules=["mlp.up_proj", "model.layers.0.self_attn.k_proj"]) == {
        *(p for p in everything if p.endswith("up_proj")), "model.layers.0.self_attn.k_proj",
    }  # fmt: skip
    assert paths(target_modules=["q_proj"], layers_to_transform=[1]) == {"model.layers.1.self_attn.q_proj"}


def test_rank_and_alpha_of_single_modules() -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj"], rank_pattern={"layers.0.*.q_proj": 2},
                        alpha_pattern={"k_proj": 2})  # fmt: skip
    model = load("llama")
    model.add_adapter(config)
    found = {path.split(".", 2)[2]: (m.lora_A["default"].shape[0], m.scaling["default"])
             for path, m in lora_layers(model).items()}  # fmt: skip
    assert found["0.self_attn.q_proj"] == (2, 4.0) and found["1.self_attn.q_proj"] == (4, 2.0)
    assert found["0.self_attn.k_proj"] == (4, 0.5)


@torch.no_grad()
def test_a_new_adapter_changes_nothing_yet() -> None:
    for init in (True, "gaussian"):
        model = get_peft_model(load("llama"), LoraConfig(target_modules="all-linear", init_lora_weights=init))
        torch.testing.assert_close(model(IDS).logits, shared("llama")(IDS).logits, **CLOSE)
        assert all(a.std() > 0 and not b.any() for a, b in factors(model).values())
    model = get_peft_model(load("llama"), LoraConfig(init_lora_weights=False))
    assert not torch.allclose(model(IDS).logits, shared("llama")(IDS).logits, atol=1e-3)


@torch.no_grad()
def test_dropout_is_of_training_alone() -> None:
    model = adapted("llama", LoraConfig(r=4, lora_alpha=6, lora_dropout=0.5, target_modules="all-linear"))
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    torch.testing.assert_close(model(IDS).logits, formula("llama", 1.5, factors(model)), rtol=1e-5, atol=1e-4)
    model.train()
    assert not torch.allclose(model(IDS).logits, model(IDS).logits, atol=1e-3)
    layer: LoraLinear = lora_layers(model)["model.layers.0.self_attn.q_proj"]
    x = torch.ones(1, layer.in_features)
    mean = torch.stack([layer.added(x) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, layer.eval().added(x), rtol=0.1, atol=0.15)


@torch.no_grad()
def test_several_adapters() -> None:
    model = load("qwen3")
    base = model(IDS).logits
    for seed, (name, targets) in enumerate({"one": ["q_proj", "up_proj"], "two": ["v_proj", "q_proj"]}.items()):
        model.add_adapter(LoraConfig(r=3 + seed, lora_alpha=3 + seed, target_modules=targets), name)
        fill(model, name, seed)
    assert model.active_adapters == ["two"]
    logits = {}
    for name in ("one", "two"):
        model.set_adapter(name)
        logits[name] = model(IDS).logits
        torch.testing.assert_close(logits[name], formula("qwen3", 1.0, factors(model, name)), rtol=1e-5, atol=1e-4)
        assert all((f".{name}" in n) == p.requires_grad for n, p in model.named_parameters())
    model.set_adapter(["one", "two"])
    both = model(IDS).logits
    assert not any(torch.allclose(both, logits[name], atol=1e-2) for name in logits)
    merged = deepcopy(model).merge_and_unload()
    torch.testing.assert_close(both, merged(IDS).logits, rtol=1e-5, atol=1e-4)
    with model.disable_adapter():
        torch.testing.assert_close(model(IDS).logits, base, **CLOSE)
    model.disable_adapters()
    torch.testing.assert_close(model(IDS).logits, base, **CLOSE)
    model.enable_adapters()
    model.delete_adapter("two")
    assert model.active_adapters == ["one"] and torch.equal(model(IDS).logits, logits["one"])
    model.delete_adapter("one")
    assert not lora_layers(model) and list(model.state_dict()) == list(shared("qwen3").state_dict())
    torch.testing.assert_close(model(IDS).logits, base, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
@torch.no_grad()
def test_merging(family: str) -> None:
    model = adapted(family)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    logits = model(IDS).logits
    model.merge_adapter()
    close = {"rtol": 0, "atol": 1e-5 * logits.abs().max().item()}
    torch.testing.assert_close(model(IDS).logits, logits, **close)
    model.unmerge_adapter()
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert torch.equal(model(IDS).logits, logits)
    model.merge_adapter()
    model.unload()
    torch.testing.assert_close(model(IDS).logits, shared(family)(IDS).logits, **CLOSE)
    model = adapted(family).merge_and_unload()
    assert not lora_layers(model) and list(model.state_dict()) == list(shared(family).state_dict())
    torch.testing.assert_close(model(IDS).logits, logits, **close)


def test_bfloat16_keeps_its_factors_in_float32() -> None:
    model = adapted("llama", dtype="bfloat16")
    pairs = factors(model)
    assert {t.dtype for pair in pairs.values() for t in pair} == {torch.float32}
    model(IDS).logits.float().square().mean().backward()
    assert all(t.grad is not None and t.grad.dtype is torch.float32 and t.grad.any() for p in pairs.values() for t in p)
    with torch.no_grad():
        logits, exact = model(IDS).logits, formula("llama", 1.5, pairs)
        merged = model.merge_and_unload()(IDS).logits
    assert logits.dtype is torch.bfloat16
    assert off(logits, exact) < 0.05 and off(merged, exact) < 0.05  # transformers' own bfloat16 is off by 0.025
    model = load("llama", dtype="bfloat16")
    model.add_adapter(LoraConfig(), autocast_adapter_dtype=False)
    assert {t.dtype for pair in factors(model).values() for t in pair} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_generation_takes_the_adapter_that_is_active(family: str) -> None:
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model = adapted(family)
    merged = deepcopy(model).merge_and_unload()
    plain, expected = shared(family).generate(IDS, **options), merged.generate(IDS, **options)
    assert not torch.equal(plain, expected)
    assert torch.equal(model.generate(IDS, **options), expected)
    with model.disable_adapter():
        assert torch.equal(model.generate(IDS, **options), plain)
    assert torch.equal(model.generate(IDS, **options), expected)
    model.merge_adapter()
    assert torch.equal(model.generate(IDS, **options), expected)
    model.unmerge_adapter()
    assert torch.equal(model.generate(IDS, **options), expected)
    assert torch.equal(model.unload().generate(IDS, **options), plain)


def test_an_engine_is_made_anew_for_other_adapters() -> None:
    model = adapted("llama")
    seen = [model.engine._current_weights()]
    model.disable_adapters()
    seen.append(model.engine._current_weights())
    model.enable_adapters()
    assert model.engine._current_weights() == seen[0] != seen[1]
    model.merge_adapter()
    assert model.engine._current_weights() != seen[0]


def test_a_kept_manager_notices_a_switch() -> None:
    model = adapted("llama")
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None)
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=128)

    def answers() -> list[list[int]]:
        found = model.generate_batch([IDS.flatten().tolist() * 2] * 2, config, sizes, persistent_manager=True)
        return [list(output.generated_tokens) for output in found.values()]

    first = answers()
    with model.disable_adapter():
        without = answers()
    assert first != without and answers() == first
    model.destroy_cached_continuous_batching_manager()


def test_copies_and_moves_keep_the_adapter() -> None:
    model = adapted("llama")
    with torch.no_grad():
        logits = model(IDS).logits
        other = deepcopy(model)
        other.disable_adapters()
        assert model.adapters.enabled and lora_layers(other)["model.layers.0.mlp.up_proj"].state is other.adapters
        assert torch.equal(model(IDS).logits, logits) and not torch.equal(other(IDS).logits, logits)
        moved = model.to(torch.bfloat16)
        assert off(moved(IDS).logits, logits) < 0.05
    q, k = (moved.model.layers[0].self_attn.get_submodule(n).weight for n in ("q_proj", "k_proj"))
    assert k.data_ptr() == q.data_ptr() + q.nbytes


def test_trained_weights_reach_the_loss() -> None:
    model = get_peft_model(load("llama"), LoraConfig(r=4, target_modules="all-linear")).train()
    trained, total = model.get_nb_trainable_parameters()
    assert 0 < trained < total // 4
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    losses = []
    for _ in range(15):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(base[n], p) for n, p in model.named_parameters() if n in base)


@torch.no_grad()
def test_the_frozen_product_stays_one_and_the_norm_is_computed_once() -> None:
    """q, k and v with adapters are one product of the weights, as without them."""
    model = adapted("llama")
    plain, rows, norms = reference(), [], []

    def linear(x: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        rows.append(weight.shape[0])
        return plain.linear(x, weight, *args, **options)

    def counted(op: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            norms.append(op)
            return op(*args, **options)

        return call

    norm_ops = {"rms_norm": counted(plain.rms_norm), "add_rms_norm": counted(plain.add_rms_norm)}
    set_kernels(model, replace(plain, linear=linear, **norm_ops))
    torch.testing.assert_close(model(IDS).logits, formula("llama", 1.5, factors(model)), rtol=1e-5, atol=1e-4)
    first, layers = model.model.layers[0], len(model.model.layers)
    qkv, gate_up = (sum(leaf.out_features for leaf in leaves) for leaves in (first.self_attn.leaves, first.mlp.leaves))
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    assert rows == [qkv, hidden, gate_up, hidden] * layers + [vocab] and len(norms) == 2 * layers


@pytest.mark.parametrize("options, says", [
    ({"r": 0}, "r=0"),
    ({"r": 2.0}, "r=2.0"),
    ({"rank_pattern": {"q_proj": -1}}, "q_proj=-1"),
    ({"lora_alpha": "8"}, "lora_alpha='8'"),
    ({"lora_dropout": 1.0}, "lora_dropout=1.0"),
    ({"bias": "lora_only"}, "bias='lora_only'"),
    ({"use_dora": True}, "use_dora=True"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"init_lora_weights": "olora"}, "olora"),
    ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "layers_to_transform"),
    ({"target_modules": ["q_proj"], "layers_pattern": "layers"}, "layers_pattern"),
])  # fmt: skip
def test_options_that_are_not_possible(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LoraConfig(**options)


@pytest.mark.parametrize("options, says", [
    ({"target_modules": ["q_proj", "c_attn", "wte"]}, r"\['c_attn', 'wte'\].*down_proj"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, r"no plain linear layer: model.embed_tokens \(Embedding\)"),
    ({"target_modules": "nothing"}, "target_modules='nothing'"),
    ({"target_modules": ["q_proj"], "layers_to_transform": [99]}, "nothing would be adapted"),
])  # fmt: skip
def test_targets_that_the_model_has_not(options: dict, says: str) -> None:
    model = load("llama")
    with pytest.raises(ValueError, match=says):
        get_peft_model(model, LoraConfig(**options))
    assert not lora_layers(model) and all(p.requires_grad for p in model.parameters())


def test_what_is_refused_of_a_model_with_adapters() -> None:
    model = adapted("llama")
    for name in ("default", "a.b", "", "keys", "training"):
        with pytest.raises(ValueError, match="adapter_name"):
            model.add_adapter(LoraConfig(), name)
    for names in ("other", [], ["default", "default"]):
        with pytest.raises(ValueError, match=r"adapter_name.*\['default'\]"):
            model.set_adapter(names)
    with pytest.raises(ValueError, match="no adapter is merged"):
        model.unmerge_adapter()
    with pytest.raises(ValueError, match="max_shard_size"):
        model.save_pretrained("nowhere", max_shard_size="1GB")
    with pytest.raises(ValueError, match="selected_adapters"):
        load("llama").save_pretrained("nowhere", selected_adapters=["default"])
    model.merge_adapter()
    for call in (model.merge_adapter, model.disable_adapters, lambda: model.add_adapter(LoraConfig(), "other"),
                 lambda: model.delete_adapter("default"), lambda: model.set_adapter("default")):  # fmt: skip
        with pytest.raises(ValueError, match=r"unmerge_adapter\(\)"):
            call()


def test_merges_that_would_spoil_weights_are_refused() -> None:
    model = adapted("llama-tied", LoraConfig(target_modules=["q_proj", "lm_head"]))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"lm_head can't be merged.*embed_tokens"):
        model.merge_adapter()
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    model = adapted("llama")
    with torch.no_grad():
        factors(model)["model.layers.1.mlp.up_proj"][1][0, 0] = float("nan")
    before = {name: p.clone() for name, p in model.state_dict().items() if "lora_" not in name}
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.*finite"):
        model.merge_adapter()
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in before) and not model.adapters.merged


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@torch.no_grad()
def test_encoders_take_adapters_too(name: str) -> None:
    from models.encoders import load as load_encoder
    from models.encoders import oracle as encoder

    model = load_encoder(name)
    model.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    fill(model)
    base = encoder(name)
    weights = dict(base.named_parameters())
    changed = {f"{path}.weight": weights[f"{path}.weight"] + 1.5 * b @ a for path, (a, b) in factors(model).items()}
    expected = torch.func.functional_call(base, changed, (IDS,)).last_hidden_state
    torch.testing.assert_close(model(IDS).last_hidden_state, expected, rtol=1e-5, atol=1e-4)
    assert len(changed) >= 4 * model.config.num_hidden_layers


def test_the_loss_sees_an_adapter_of_the_head() -> None:
    """The loss that makes no logits multiplies with the head's weight alone, where that is all there is."""
    model = adapted("llama", LoraConfig(r=4, lora_alpha=6, target_modules=["lm_head", "q_proj"])).train()
    loss = model(IDS, labels=IDS).loss
    expected = cross_entropy(formula("llama", 1.5, factors(model))[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    leaves = [t for pair in factors(model).values() for t in pair]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())
    with model.disable_adapter():
        torch.testing.assert_close(model(IDS, labels=IDS).loss, shared("llama")(IDS, labels=IDS).loss, **CLOSE)


def test_a_running_manager_notices_a_switch_between_requests() -> None:
    """Its next prompt shares no pages with those that another adapter computed."""
    model, prompt = adapted("llama"), tokens(1, 2 * PAGE_SIZE + 9)[0].tolist()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = [model.generate(torch.tensor([prompt]), pad_token_id=0, **options)[0, len(prompt):].tolist()]
    with model.disable_adapter():
        expected.append(model.generate(torch.tensor([prompt]), pad_token_id=0, **options)[0, len(prompt):].tolist())
    manager = model.init_continuous_batching(
        GenerationConfig(**options), ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=1024)
    )
    manager.start()
    found = []
    for on in (True, False, True):
        (model.enable_adapters if on else model.disable_adapters)()
        manager.add_request(prompt)
        found.append(list(manager.get_result(timeout=60).generated_tokens))
    manager.stop()
    assert found == [*expected, expected[0]] and expected[0] != expected[1]
