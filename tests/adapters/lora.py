"""Adapters with values that matter, and W + scaling * B A on the transformers model: the oracle."""

from typing import Any

import torch
from models.checkpoints import load, oracle, tokens
from torch import Tensor

from cuformers.adapters.config import LoraConfig
from cuformers.adapters.layer import lora_layers

IDS = tokens(2, 9)
FAMILIES = ("llama-mha-untied-biases", "qwen3", "phi3", "gemma2", "granite")
"""Separate and packed products, biases, norms after a product, a factor before the residual."""


def fill(model: Any, name: str = "default", seed: int = 1) -> None:
    """Random A and B, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for pair in factors(model, name).values():
            for factor in pair:
                factor.copy_(0.2 * torch.randn(factor.shape, generator=generator))


def adapted(family: str, config: LoraConfig | None = None, **options: Any) -> Any:
    """A model with a filled adapter on all its linear layers, if the config says nothing else."""
    model = load(family, **options)
    model.add_adapter(config or LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    fill(model)
    return model


def factors(model: Any, name: str = "default") -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by module."""
    return {path: (m.lora_A[name], m.lora_B[name]) for path, m in lora_layers(model).items() if name in m.lora_A}


def formula(family: str, scaling: float, factors: dict[str, tuple[Tensor, Tensor]], ids: Tensor = IDS) -> Tensor:
    """Logits of the transformers model whose weights are W + scaling * B A; gradients reach A and B."""
    base = oracle(family)
    weights = dict(base.named_parameters())
    names = {f"{path}.weight": pair for path, pair in factors.items()}
    changed = {name: weights[name].detach() + scaling * b @ a for name, (a, b) in names.items()}
    return torch.func.functional_call(base, changed, (ids,), tie_weights=False).logits
