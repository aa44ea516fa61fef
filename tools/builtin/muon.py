"""Muon for the matrices of a small model, AdamW for the rest.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): the momentum of a matrix is replaced by its
nearest orthogonal matrix, found by five steps of a quintic Newton-Schulz iteration.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(batch: Tensor) -> Tensor:
    """Approximately U V^T of each matrix [..., m, n]."""
    a, b, c = COEFFICIENTS
    x = batch.bfloat16() if batch.is_cuda else batch.float()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(batch.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; matrices of one shape are updated as one batch."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in params:
            shapes.setdefault(tuple(p.shape), []).append(p)
        super().__init__([{"params": p} for p in shapes.values()], {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            same = group["params"]
            grad = torch.stack([p.grad for p in same])
            state = self.state[same[0]]
            speed = state.setdefault("speed", torch.zeros_like(grad))
            speed.lerp_(grad, 1 - group["momentum"])
            update = orthogonal(grad.lerp(speed, group["momentum"]))
            scale = max(1.0, same[0].shape[0] / same[0].shape[1]) ** 0.5
            for p, turn in zip(same, update, strict=True):
                p.mul_(1 - group["lr"] * group["decay"]).sub_(turn, alpha=group["lr"] * scale)


def optimizers(model: nn.Module, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """[Muon over the layers' matrices, AdamW over embedding and norms]; each group keeps its peak rate as "peak"."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    fused = others[0].is_cuda
    adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    both = [Muon(matrices, lr=muon_lr), adam]
    for optimizer in both:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return both
