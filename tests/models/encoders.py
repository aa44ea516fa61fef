"""A tiny random encoder of every family, made by transformers: the rows of the encoders' parity tests."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

torch.set_num_threads(1)

_ROOT = tempfile.TemporaryDirectory(prefix="cuformers-encoders-")  # of this process alone; removed at its end
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # weights large enough that a wrong term shows
}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MODERN = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 16}
_THETAS = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}


class Encoder(NamedTuple):
    """One row: the configuration class of transformers and what it is given beside COMMON."""

    config: str
    options: dict[str, Any]


ENCODERS: dict[str, Encoder] = {
    "bert": Encoder("BertConfig", _BERT),
    "bert-tanh-gelu": Encoder("BertConfig", {**_BERT, "hidden_act": "gelu_new", "type_vocab_size": 3}),
    "modernbert": Encoder("ModernBertConfig", _MODERN),
    "modernbert-odd-window": Encoder("ModernBertConfig", {**_MODERN, "local_attention": 9}),
    "modernbert-biases": Encoder(
        "ModernBertConfig",
        {**_MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": _THETAS},
    ),
    "modernbert-types": Encoder(
        "ModernBertConfig", {**_MODERN, "layer_types": ["sliding_attention", "full_attention"] * 2}
    ),
}


def tiny_encoder_config(name: str) -> Any:
    """The transformers configuration of a row."""
    import transformers

    row = ENCODERS[name]
    return getattr(transformers, row.config)(**{**COMMON, **row.options})


def randomize(model: Any) -> Any:
    """The model with norm weights and biases away from their neutral values."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@cache
def oracle(name: str, kind: str = "AutoModel") -> Any:
    """The transformers model of a row, in eval mode; never change it."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(tiny_encoder_config(name), attn_implementation="eager")
    return randomize(model.float().eval())


@cache
def folder(name: str, kind: str = "AutoModel") -> Path:
    """The row's checkpoint, written by transformers."""
    path = Path(_ROOT.name) / f"{name}-{kind}"
    oracle(name, kind).save_pretrained(path)
    return path


def load(name: str, kind: str = "AutoModel", **options: Any) -> Any:
    """The row's checkpoint, loaded by cuformers."""
    from cuformers import AutoModel

    where: dict[str, Any] = {"dtype": "float32", "device_map": "cpu", "progress": False}
    return AutoModel.from_pretrained(folder(name, kind), **{**where, **options})
