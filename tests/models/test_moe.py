"""What only mixtures of experts have: whole stacks in a file, real sizes, the balancing loss, options of their own."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from cuformers.auto.base_model import AutoModel
from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.auto.config import AutoConfig
from cuformers.auto.model import build
from cuformers.models.registry import find
from models.checkpoints import folder, load, oracle, shared, tokens
from models.families import FAMILIES

KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
MIXTURES = [name for name in FAMILIES if name.split("-")[0] in KINDS]
QWEN3_30B_A3B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_window_layers": 48, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
QWEN15_A27B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
    "use_sliding_window": False, "max_window_layers": 21,
}  # fmt: skip
GPT_OSS_20B = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0,
}  # fmt: skip
OLMOE_7B = {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
}  # fmt: skip
REAL = [
    ("mixtral", {}, 46_702_792_704),
    ("qwen2_moe", QWEN15_A27B, 14_315_784_192),
    ("qwen3_moe", QWEN3_30B_A3B, 30_532_122_624),
    ("olmoe", OLMOE_7B, 6_919_161_856),
    ("gpt_oss", GPT_OSS_20B, 20_914_757_184),
]


@pytest.mark.parametrize("name, sizes, count", REAL, ids=[name for name, *_ in REAL])
def test_published_models_have_their_number_of_parameters(
    name: str, sizes: dict, count: int, capsys: pytest.CaptureFixture
) -> None:
    config = AutoConfig.for_model(name, **sizes)
    assert build(find(name), config).num_parameters() == count
    assert "without meaning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", MIXTURES)
def test_a_file_of_whole_stacks_is_read_too(name: str, tmp_path: Path) -> None:
    oracle(name).save_pretrained(tmp_path, save_original_format=False)
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in load_file(tmp_path / "model.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu", progress=False)
    expected = shared(name).state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", KINDS)
def test_without_a_head(name: str, tmp_path: Path) -> None:
    """Read from a file with a head, saved without, and read again by both."""
    model, ids = AutoModel.from_pretrained(folder(name), device_map="cpu", progress=False), tokens(2, 15)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, device_map="cpu", progress=False)
    theirs = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = oracle(name).model(ids).last_hidden_state
        for one in (model, again, theirs):
            torch.testing.assert_close(one(ids).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_balancing_loss_and_its_gradients(name: str) -> None:
    theirs, model = copy.deepcopy(oracle(name)).train(), load(name).train()
    model.config.router_aux_loss_coef = theirs.router_aux_loss_coef = 0.5
    ids, mask = tokens(2, 25), torch.ones(2, 25, dtype=torch.int64)
    mask[0, 17:] = 0
    options = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "output_router_logits": True}
    right, found = theirs(ids, **options), model(ids, **options)
    torch.testing.assert_close(found.aux_loss, right.aux_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.loss, right.loss, rtol=1e-5, atol=0)
    assert len(found.router_logits) == len(right.router_logits)
    real = mask.flatten().bool()
    for ours, expected in zip(found.router_logits, right.router_logits):
        torch.testing.assert_close(ours[real], expected[real], rtol=1e-4, atol=1e-4)
        assert not ours[~real].any()
    (right.loss + found.loss).backward()
    for parameter, p in theirs.named_parameters():
        error = (model.get_parameter(parameter).grad - p.grad).norm() / p.grad.norm()
        assert error < 1e-3, f"{name} {parameter}: relative error {error:.1e}"


def test_routers_are_asked_only_where_wanted() -> None:
    model, ids = load("mixtral"), tokens(1, 5)
    quiet = model(ids, labels=ids)
    assert quiet.aux_loss is None and quiet.router_logits is None and "aux_loss" not in quiet
    model.config.output_router_logits = True
    loud = model(ids, labels=ids)
    assert loud.loss > quiet.loss and model(ids, output_router_logits=False).router_logits is None
    torch.testing.assert_close(loud.loss, quiet.loss + model.config.router_aux_loss_coef * loud.aux_loss)
    with pytest.raises(ValueError, match=r"output_router_logits=True.*'llama'.*no experts"):
        load("llama")(ids, output_router_logits=True)


def test_another_limit_of_the_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"swiglu_limit=5.0.*allowed is 7.0"):
        AutoConfig.for_model("gpt_oss", **{**GPT_OSS_20B, "swiglu_limit": 5.0})


def test_noise_on_the_routers_is_refused_in_training() -> None:
    model = load("mixtral", router_jitter_noise=0.1)
    with pytest.raises(ValueError, match=r"router_jitter_noise=0.1"):
        model.train()


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_random_weights_reach_routers_and_experts(name: str) -> None:
    config = AutoConfig.from_pretrained(folder(name))
    model = AutoModelForCausalLM.from_config(config, device_map="cpu", seed=0)
    for parameter, p in model.named_parameters():
        if parameter.endswith("bias"):
            assert not p.any(), parameter
        elif p.dim() > 1:
            assert 0.15 < p.std() < 0.25 and p.mean().abs() < 0.1, parameter  # initializer_range is 0.2


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_the_number_of_experts_under_either_name(name: str) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for key in ("num_experts", "num_local_experts"):
        config = find(name).config.from_dict({**sizes, "num_key_value_heads": 2, key: 9})
        assert config.expert_count == 9 and key not in config.extra
    with pytest.raises(ValueError, match=r"num_experts_per_tok=10.*at most the number of experts, 9"):
        find(name).config.from_dict({**sizes, "num_key_value_heads": 2, "num_experts": 9, "num_experts_per_tok": 10})
