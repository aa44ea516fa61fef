"""AdamW over a model's parameters, and over a float32 copy of them where the model computes in bfloat16."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from cuformers.nn.norm import LayerNorm, RMSNorm
from cuformers.train.arguments import TrainingArguments

_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_NORMS = (nn.LayerNorm, nn.RMSNorm, LayerNorm, RMSNorm)


def decays(model: nn.Module) -> dict[str, bool]:
    """For each parameter whether weight decay applies to it: not to biases, and not to norms."""
    of_norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _NORMS)
        for name, _ in module.named_parameters(recurse=False)
    }
    names = [name for name, _ in model.named_parameters()]
    return {name: name not in of_norms and not _UNDECAYED.search(name.lower()) for name in names}


def make_adamw(model: nn.Module, args: TrainingArguments) -> AdamW:
    """AdamW in two groups, with weight decay and without; over float32 copies with args.bf16 (see `Masters`)."""
    decay = decays(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter with requires_grad=True: there is nothing to train.")
    masters = {p: nn.Parameter(p.detach().float()) if args.bf16 else p for _, p in trained}
    groups = [
        {"params": [masters[p] for name, p in trained if decay[name] is wanted], "weight_decay": share}
        for wanted, share in ((True, args.weight_decay), (False, 0.0))
    ]
    return AdamW(
        groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=args.optim == "adamw_torch_fused",
    )


class Masters:
    """Float32 copies of a bfloat16 model's parameters: the optimizer's own, in the order of its groups.

    Each gradient is added to the copy's in float32 as soon as a backward pass has it, and dropped from the model.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        decay = decays(model)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        ordered = [p for wanted in (True, False) for name, p in trained if decay[name] is wanted]
        copies = [p for group in optimizer.param_groups for p in group["params"]]
        assert [p.shape for p in ordered] == [p.shape for p in copies], "the optimizer is not make_adamw's"
        self._pairs = list(zip(ordered, copies))
        self._hooks = [p.register_post_accumulate_grad_hook(_adder(copy)) for p, copy in self._pairs]

    def publish(self) -> None:
        """Rounds the copies into the model's parameters."""
        with torch.no_grad():
            for parameter, copy in self._pairs:
                parameter.copy_(copy)

    def state(self) -> list[Tensor]:
        """The copies."""
        return [copy.detach() for _, copy in self._pairs]

    def restore(self, copies: list[Tensor]) -> None:
        """Takes what `state` gave."""
        with torch.no_grad():
            for (_, mine), saved in zip(self._pairs, copies, strict=True):
                mine.copy_(saved)

    def close(self) -> None:
        """The model's parameters keep their own gradients again."""
        for hook in self._hooks:
            hook.remove()


def _adder(copy: nn.Parameter) -> Any:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad = parameter.grad.float()
        copy.grad = grad if copy.grad is None else copy.grad.add_(grad)
        parameter.grad = None

    return add


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """What an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def grad_norm(optimizer: Optimizer, largest: float) -> Tensor:
    """Norm of all gradients together, float32 on their device; they are scaled down to `largest`, where it is not 0."""
    parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if largest > 0:
        nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return norm
