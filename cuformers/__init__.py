"""Hugging Face Transformers' API at the NVIDIA GPU's speed.

The names below are imported when they are first used: `import cuformers` alone loads no torch.
"""

from importlib import import_module
from typing import Any

from cuformers.base.version import VERSION as __version__

_HOME_OF = {
    "AttentionInterface": "cuformers.nn.attention.registered",
    "AttentionMaskInterface": "cuformers.nn.attention.registered",
    "AutoConfig": "cuformers.auto",
    "AutoModel": "cuformers.auto",
    "AutoModelForCausalLM": "cuformers.auto",
    "AutoTokenizer": "cuformers.auto",
    "FeatureExtractionPipeline": "cuformers.auto",
    "TextGenerationPipeline": "cuformers.auto",
    "get_peft_model": "cuformers.auto.adapting",
    "pipeline": "cuformers.auto",
    "ContinuousBatchingConfig": "cuformers.generation.batching_config",
    "ContinuousBatchingManager": "cuformers.auto.batching.manager",
    "GenerationOutput": "cuformers.auto.batching.output",
    "RequestStatus": "cuformers.auto.batching.output",
    "GenerationConfig": "cuformers.generation",
    "KernelConfig": "cuformers.kernels.hub.config",
    "LoraConfig": "cuformers.adapters.config",
    "LogitsProcessor": "cuformers.generation",
    "LogitsProcessorList": "cuformers.generation",
    "StoppingCriteria": "cuformers.generation",
    "StoppingCriteriaList": "cuformers.generation",
    "TextIteratorStreamer": "cuformers.auto",
    "TextStreamer": "cuformers.auto",
    "set_seed": "cuformers.base.seeding",
    "DataCollatorForLanguageModeling": "cuformers.train.collators",
    "DataCollatorWithPadding": "cuformers.train.collators",
    "EarlyStoppingCallback": "cuformers.train.callbacks",
    "EvalPrediction": "cuformers.train.evaluation",
    "Trainer": "cuformers.train.trainer",
    "TrainerCallback": "cuformers.train.callbacks",
    "TrainerControl": "cuformers.train.state",
    "TrainerState": "cuformers.train.state",
    "TrainingArguments": "cuformers.train.arguments",
    "default_data_collator": "cuformers.train.collators",
    "get_scheduler": "cuformers.train.schedule",
}

__all__ = ["__version__", *_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
