"""A tiny random state-space model of every family, made by transformers: the rows of their parity tests."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

torch.set_num_threads(1)

_ROOT = tempfile.TemporaryDirectory(prefix="cuformers-states-")  # of this process alone; removed at its end
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "state_size": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # weights large enough that a wrong term shows in the logits
    "use_cache": False,
}
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16}


class StateSpace(NamedTuple):
    """One row: the configuration class of transformers and what it is given beside COMMON."""

    config: str
    options: dict[str, Any]


STATE_SPACE: dict[str, StateSpace] = {
    "mamba": StateSpace("MambaConfig", {}),
    "mamba-biases-untied": StateSpace(
        "MambaConfig",
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "conv_kernel": 3, "expand": 3}
        | {"time_step_rank": 5, "residual_in_fp32": False},
    ),
    "falcon_mamba": StateSpace("FalconMambaConfig", {"mixer_rms_eps": 1e-3}),
    "mamba2": StateSpace("Mamba2Config", _MAMBA2),
    "mamba2-biases-tied": StateSpace(
        "Mamba2Config",
        {**_MAMBA2, "n_groups": 1, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}
        | {"time_step_limit": (0.01, 0.5), "residual_in_fp32": False},
    ),
}


@cache
def oracle(name: str) -> Any:
    """The transformers model of a row, in eval mode, all its parameters away from neutral values; never change it."""
    import transformers

    row = STATE_SPACE[name]
    torch.manual_seed(0)
    config = getattr(transformers, row.config)(**{**COMMON, **row.options})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@cache
def folder(name: str) -> Path:
    """The row's checkpoint, written by transformers."""
    path = Path(_ROOT.name) / name
    oracle(name).save_pretrained(path)
    return path


def load(name: str, **options: Any) -> Any:
    """The row's checkpoint, loaded by cuformers."""
    from cuformers import AutoModelForCausalLM

    where: dict[str, Any] = {"dtype": "float32", "device_map": "cpu", "progress": False}
    return AutoModelForCausalLM.from_pretrained(folder(name), **{**where, **options})
