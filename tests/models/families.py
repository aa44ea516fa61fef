"""A tiny random model of every family and rotary scaling, made by transformers: the rows of the parity tests."""

from typing import Any, NamedTuple

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # weights large enough that a wrong term shows in the logits
}
PAIRS = 8  # rotated pairs of a head of 16


class Family(NamedTuple):
    """One row: the configuration class of transformers and what it is given beside COMMON."""

    config: str
    options: dict[str, Any]


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


_LONG = _rope(
    rope_type="longrope",
    short_factor=[1.0 + 0.05 * i for i in range(PAIRS)],
    long_factor=[1.0 + 0.9 * i for i in range(PAIRS)],
    original_max_position_embeddings=32,
)
_LLAMA3 = _rope(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
_SCALES = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", {}),
    "llama-mha-untied-biases": Family(
        "LlamaConfig",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "llama-tied": Family("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-head-dim": Family("LlamaConfig", {"head_dim": 32}),
    "llama-linear": Family("LlamaConfig", _rope(rope_type="linear", factor=4.0)),
    "llama-dynamic": Family("LlamaConfig", _rope(rope_type="dynamic", factor=2.0)),
    "llama-yarn": Family("LlamaConfig", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama3": Family("LlamaConfig", _LLAMA3),
    "mistral": Family("MistralConfig", {"sliding_window": 8}),
    "mistral-no-window": Family("MistralConfig", {"sliding_window": None}),
    "qwen2": Family("Qwen2Config", {}),
    "qwen2-window": Family("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": Family("Qwen3Config", {"head_dim": 32}),
    "qwen3-tied": Family("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": Family("Gemma2Config", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3_text": Family("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3_text-pattern": Family(
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "phi3": Family("Phi3Config", {}),
    "phi3-longrope": Family("Phi3Config", dict(original_max_position_embeddings=32, **_LONG)),
    "phi3-partial-window": Family(
        "Phi3Config", dict(sliding_window=8, **_rope(rope_type="default", partial_rotary_factor=0.5))
    ),
    "olmo2": Family("Olmo2Config", {}),
    "smollm3": Family("SmolLM3Config", {}),
    "smollm3-window": Family("SmolLM3Config", {"use_sliding_window": True, "sliding_window": 8}),
    "granite": Family("GraniteConfig", _SCALES),
    "mixtral": Family("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": Family("MixtralConfig", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 8}),
    "qwen2_moe": Family("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": True}),
    "qwen2_moe-sparse-window": Family(
        "Qwen2MoeConfig",
        {**_EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "qkv_bias": False}
        | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    ),
    "qwen3_moe": Family("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3_moe-window": Family(
        "Qwen3MoeConfig",
        {**_EXPERTS, "head_dim": 16, "mlp_only_layers": [1], "attention_bias": True}
        | {"use_sliding_window": True, "sliding_window": 8},
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 8}
        | _rope(rope_type="yarn", factor=4.0, truncate=False, original_max_position_embeddings=16),
    ),
    "olmoe": Family("OlmoeConfig", {"num_experts": 7, "num_experts_per_tok": 3}),
    "olmoe-clipped": Family(
        "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.7, "norm_topk_prob": True}
    ),
}


def tiny_config(name: str) -> Any:
    """The transformers configuration of a row."""
    import transformers

    family = FAMILIES[name]
    return getattr(transformers, family.config)(**{**COMMON, **family.options})


def with_head_dim(raw: dict[str, Any]) -> dict[str, Any]:
    """A configuration of transformers with the head_dim that Mixtral's leaves open: None means what the sizes give."""
    if "head_dim" in raw and raw["head_dim"] is None:
        return {**raw, "head_dim": raw["hidden_size"] // raw["num_attention_heads"]}
    return raw


def tiny_model(name: str, seed: int = 0) -> Any:
    """A random transformers model of a row, with norm weights and biases away from their neutral values."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            assert torch.isfinite(parameter).all(), parameter_name
    return model
