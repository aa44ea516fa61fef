"""The front that Transformers' users know: AutoConfig, AutoTokenizer, AutoModelForCausalLM, pipeline."""

from cuformers.auto.tokenizer import AutoTokenizer

__all__ = ["AutoTokenizer"]
