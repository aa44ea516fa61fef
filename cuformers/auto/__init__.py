"""The front that Transformers' users know: AutoConfig, AutoTokenizer, AutoModel, AutoModelForCausalLM, pipeline."""

from importlib import import_module

_HOME_OF = {
    "AutoConfig": "config",
    "AutoModel": "base_model",
    "AutoModelForCausalLM": "causal_lm",
    "AutoTokenizer": "tokenizers.tokenizer",
    "AsyncTextIteratorStreamer": "streamers",
    "BaseStreamer": "streamers",
    "FeatureExtractionPipeline": "pipelines.feature_extraction",
    "TextGenerationPipeline": "pipelines.text_generation",
    "TextIteratorStreamer": "streamers",
    "TextStreamer": "streamers",
    "pipeline": "pipelines.pipeline",
}

__all__ = [*_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
