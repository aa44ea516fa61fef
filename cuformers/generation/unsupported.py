"""Transformers' generation options that cuformers lacks: what is neutral, what is refused, and what to do instead."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cuformers.base.log import notice


@dataclass(frozen=True)
class Unsupported:
    """One option of Transformers' GenerationConfig that is not implemented here."""

    neutral: tuple[Any, ...]
    """Values, beside None, that mean "off" and are therefore accepted."""
    remedy: str
    """What to do instead, as a sentence."""
    inert: bool = False
    """True: the option only tunes a feature that is refused, or a speed; it changes no token, so it gets a notice."""


_GROUPS = "Groups of beams are not supported; use num_beams alone, or do_sample=True with num_return_sequences."
_ASSISTED = "Tokens are guessed by prompt_lookup_num_tokens or an assistant_model; the answer is the same without."
_INERT_GROUPS = "It only acts between groups of beams, which are not supported."
_INERT_ASSISTED = "An assistant model always guesses num_assistant_tokens tokens; the answer is the same."
_HUB = "This decoding method is not supported; use do_sample=True or greedy decoding."
_ENCODER = "It needs an encoder's input; use the option of the same name without 'encoder_'."
_CACHE = (
    "The paged cache serves every call; leave it out, or use None, 'dynamic', 'static' or 'paged'. "
    "kv_cache_dtype='fp8_e4m3' of generate and of ContinuousBatchingConfig halves its bytes."
)
_GRAPHS = "Decoding is captured in CUDA graphs by itself; leave it out."

UNSUPPORTED: Mapping[str, Unsupported] = {
    "num_beam_groups": Unsupported((1,), _GROUPS),
    "diversity_penalty": Unsupported((0.0,), _INERT_GROUPS, inert=True),
    "constraints": Unsupported((), _HUB),
    "force_words_ids": Unsupported((), _HUB),
    "penalty_alpha": Unsupported((0.0,), _HUB),
    "dola_layers": Unsupported((), _HUB),
    "low_memory": Unsupported((False,), "It only acts in contrastive search, which is not supported.", inert=True),
    "guidance_scale": Unsupported((1, 1.0), "Classifier-free guidance is not supported; leave it out."),
    "watermarking_config": Unsupported((), "Watermarking is not supported; pass a LogitsProcessor of your own."),
    "token_healing": Unsupported((False,), "End the prompt at a token boundary instead."),
    "encoder_repetition_penalty": Unsupported((1.0,), _ENCODER),
    "encoder_no_repeat_ngram_size": Unsupported((0,), _ENCODER),
    "decoder_start_token_id": Unsupported((), "It only acts in encoder-decoder models.", inert=True),
    "output_attentions": Unsupported((False,), "Attention weights are never materialized while generating."),
    "output_hidden_states": Unsupported((False,), "A forward hook on model.model.layers[i] sees them."),
    "use_cache": Unsupported((True,), "The cache is always used; the tokens are the same.", inert=True),
    "cache_implementation": Unsupported(("dynamic", "static", "paged"), _CACHE),
    "cache_config": Unsupported((), _CACHE),
    "max_cache_len": Unsupported((), "The paged cache grows by itself.", inert=True),
    "prefill_chunk_size": Unsupported((), "max_batch_tokens of continuous batching says how prompts are cut."),
    "compile_config": Unsupported((), _GRAPHS),
    "disable_compile": Unsupported((True, False), _GRAPHS),
    "continuous_batching_config": Unsupported((), "Pass it to generate_batch or init_continuous_batching."),
    "use_mtp": Unsupported((False,), _ASSISTED),
    "is_assistant": Unsupported((False,), _INERT_ASSISTED, inert=True),
    "num_assistant_tokens_schedule": Unsupported(("constant",), _INERT_ASSISTED, inert=True),
    "assistant_confidence_threshold": Unsupported((0.4,), _INERT_ASSISTED, inert=True),
    "assistant_lookbehind": Unsupported((10,), _INERT_ASSISTED, inert=True),
    "target_lookbehind": Unsupported((10,), _INERT_ASSISTED, inert=True),
    "assistant_ensemble_weight": Unsupported((), _INERT_ASSISTED, inert=True),
    "assistant_early_exit": Unsupported((), _ASSISTED),
    "speculation_type": Unsupported((), _ASSISTED),
}
"""Every field of Transformers 5.17's GenerationConfig that GenerationConfig here does not have."""

_ITSELF = "It is an argument of generate() itself, not one of its options: pass it there."
ARGUMENTS: Mapping[str, str] = {
    "logits_processor": _ITSELF,
    "stopping_criteria": _ITSELF,
    "prefix_allowed_tokens_fn": _ITSELF,
    "streamer": _ITSELF,
    "tokenizer": _ITSELF,
    "assistant_model": _ITSELF,
    "kv_cache_dtype": "It is an argument of generate() itself, and a field of ContinuousBatchingConfig: pass it there.",
    "negative_prompt_ids": "Classifier-free guidance is not supported; leave it out.",
    "negative_prompt_attention_mask": "Classifier-free guidance is not supported; leave it out.",
    "synced_gpus": "Ranks may end at different steps; leave it out.",
    "custom_generate": "Code from a checkpoint is never run; pass a LogitsProcessor or StoppingCriteria of your own.",
}
"""Arguments of Transformers' generate that are no options, and what to do with them."""

METADATA = ("transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash")
"""Keys of a file that say where it came from: kept, never an option."""


def is_neutral(name: str, value: object) -> bool:
    """Whether the value of an unsupported option asks for nothing."""
    return value is None or any(value == n and type(value) is type(n) for n in UNSUPPORTED[name].neutral)


def check_unsupported(options: Mapping[str, object]) -> None:
    """Raises ValueError for an unsupported option that asks for something; one notice where it changes no token."""
    for name, value in options.items():
        if name not in UNSUPPORTED or is_neutral(name, value):
            continue
        entry = UNSUPPORTED[name]
        if not entry.inert:
            allowed = " or ".join(repr(v) for v in (None, *entry.neutral))
            raise ValueError(f"{name}={value!r} is not supported: allowed is {allowed}. {entry.remedy}")
        notice(f"{name}={value!r} has no effect. {entry.remedy}", once=True)
