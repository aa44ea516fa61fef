"""Flags that say which model to load, where and how."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuformers.auto.model import PreTrainedModel
    from cuformers.auto.tokenizers.tokenizer import Tokenizer


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --dtype, --device and the like."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype", default="auto", help="of the weights: auto (the checkpoint's), bfloat16, float16 or float32"
    )
    group.add_argument("--device", help='"cuda", "cuda:1", "cpu" or "auto"; the GPU where there is one')
    group.add_argument(
        "--attn-implementation", metavar="NAME", help="attention backend: eager, sdpa, flash_attention_2 ..."
    )
    group.add_argument("--kernels", choices=("auto", "reference", "triton"), default="auto", help="default auto")
    group.add_argument("--revision", help="branch, tag or commit of a hub repository")


def load_tokenizer(name: str | Path, arguments: argparse.Namespace) -> "Tokenizer":
    """The tokenizer of a folder or hub id."""
    from cuformers.auto.tokenizers.tokenizer import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, revision=arguments.revision)


def load_model(name: str | Path, arguments: argparse.Namespace) -> "PreTrainedModel":
    """The model of a folder or hub id."""
    from cuformers.auto.causal_lm import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        name,
        dtype=arguments.dtype,
        device_map=arguments.device,
        attn_implementation=arguments.attn_implementation,
        kernels=arguments.kernels,
        revision=arguments.revision,
    )
