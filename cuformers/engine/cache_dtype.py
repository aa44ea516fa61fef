"""What keys and values are kept in: the model's dtype, or fp8."""

from collections.abc import Iterable

from cuformers.base.errors import bad_argument
from cuformers.cuda.device import capability
from cuformers.generation.batching_config import KV_CACHE_DTYPES
from cuformers.nn.decoder import CausalLM

LEAST_CAPABILITY = (8, 9)
"""GPUs from here on turn fp8 into other formats by themselves."""


def wants_fp8(kv_cache_dtype: str, models: Iterable[CausalLM]) -> bool:
    """Whether the keys and values of these models are kept in fp8: "auto" says no.

    Raises:
        ValueError: the name is unknown, or fp8 is not possible for one of the models where it is.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise bad_argument("kv_cache_dtype", kv_cache_dtype, f"one of {list(KV_CACHE_DTYPES)}")
    if kv_cache_dtype == "auto":
        return False
    for model in models:
        reason = why_not_fp8(model)
        if reason is not None:
            raise bad_argument("kv_cache_dtype", kv_cache_dtype, f"'auto' for this model ({reason})")
    return True


def why_not_fp8(model: CausalLM) -> str | None:
    """The reason why a model's keys can't be kept in fp8; None where they can."""
    if model.ops.deterministic:
        return "it is deterministic: `forward`, which keeps no keys, would not give the bits of generation"
    if model.model.attention_specs[0].head_dim % 2:
        return f"fp8 is read in pairs, and its head_dim is {model.model.attention_specs[0].head_dim}"
    for device in model.model.layer_devices:
        have = capability(device)
        if have is not None and have < LEAST_CAPABILITY:
            return f"{device} has compute capability {have[0]}.{have[1]}, fp8 needs 8.9"
    return None
