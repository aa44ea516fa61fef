"""Every architecture that we have, by config.json's `model_type`."""

from functools import cache

from cuformers.models.spec import ModelSpec


@cache
def specs() -> dict[str, ModelSpec]:
    """model_type -> ModelSpec."""
    from cuformers.models import (
        bert,
        gemma,
        gpt_oss,
        llama,
        mamba,
        mixtral,
        modernbert,
        olmo2,
        olmoe,
        phi3,
        qwen,
        qwen_moe,
    )

    families = (llama, qwen, gemma, phi3, olmo2, mixtral, qwen_moe, olmoe, gpt_oss, bert, modernbert, mamba)
    return {spec.model_type: spec for family in families for spec in family.SPECS}


def find(model_type: object) -> ModelSpec:
    """The architecture of a config.json.

    Raises:
        ValueError: we don't have it; the message lists what we have.
    """
    known = specs()
    if not isinstance(model_type, str) or model_type not in known:
        raise ValueError(f"model_type={model_type!r} is not an architecture of cuformers: it has {sorted(known)}.")
    return known[model_type]
