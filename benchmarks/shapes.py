"""Named model shapes with random weights, and the least time that a decode step can take."""

from typing import Any

BANDWIDTH = 4.3e12  # bytes/s, a measured device-to-device copy on one H200
QWEN3 = dict(model_type="qwen3", vocab_size=151936, rope_theta=1e6, max_position_embeddings=40960, rms_norm_eps=1e-6)

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": dict(
        **QWEN3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "qwen3-8b": dict(
        **QWEN3, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    ),
    "llama-3.2-1b": dict(
        model_type="llama", vocab_size=128256, rope_theta=5e5, max_position_embeddings=131072, rms_norm_eps=1e-5,
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
    "qwen3-30b-a3b": dict(
        QWEN3, model_type="qwen3_moe", hidden_size=2048, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, tie_word_embeddings=False,
    ),
}  # fmt: skip


def weight_bytes(shape: dict[str, Any], rows: int = 1) -> int:
    """Bytes of bf16 weights that a decode step of so many rows reads: all layers and the head.

    Of experts, those that are chosen at least once if every row chooses at random.
    """
    h, d, q, kv = (shape[k] for k in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"))
    layer = h * d * (q + 2 * kv) + q * d * h
    if "num_experts" in shape:
        count = shape["num_experts"]
        read = count * (1 - (1 - shape["num_experts_per_tok"] / count) ** rows)
        layer += h * count + round(3 * h * shape["moe_intermediate_size"] * read)
    else:
        layer += 3 * h * shape["intermediate_size"]
    return 2 * (shape["num_hidden_layers"] * layer + shape["vocab_size"] * h)


def floor_seconds(shape: dict[str, Any], batch: int, prompt: int, new: int) -> float:
    """Least time of the decode steps of `batch` equal requests: weights once a step, every key and value once."""
    per_token = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"] * 2
    cached = batch * sum(prompt + i for i in range(new)) * per_token
    return (new * weight_bytes(shape, batch) + cached) / BANDWIDTH
