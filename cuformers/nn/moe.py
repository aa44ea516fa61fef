"""The mixture-of-experts block: a router picks a few gated feed-forward blocks for each token (arXiv 1701.06538)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cuformers.base.errors import bad_argument
from cuformers.kernels.activation import CLAMPED_SWIGLU
from cuformers.kernels.experts import Biases
from cuformers.nn.kernel_module import KernelModule
from cuformers.nn.mlp import ACTIVATIONS, GatedMLP
from cuformers.nn.norm import RMSNorm
from cuformers.nn.project import project


class Router(KernelModule):
    """One logit for each expert."""

    def __init__(self, hidden_size: int, num_experts: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, E]."""
        return self.ops.linear(x, self.weight, self.bias)


class Experts(nn.Module):
    """The weights of all experts, each kind in one tensor, under the names that Transformers has in memory."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))


class MoE(KernelModule):
    """Stands where a GatedMLP would: the same call, the same meaning of norm, residual and scale.

    Args:
        top_k: experts of a token.
        normalise: a token's weights are divided by their sum.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        *,
        num_experts: int,
        top_k: int,
        normalise: bool,
    ) -> None:
        super().__init__()
        if hidden_act not in ACTIVATIONS:
            raise bad_argument("hidden_act", hidden_act, f"one of {sorted(ACTIVATIONS)}")
        self.activation = ACTIVATIONS[hidden_act]
        self.top_k = top_k
        self.normalise = normalise
        self.gate = Router(hidden_size, num_experts)
        self.experts = Experts(hidden_size, intermediate_size, num_experts)

    def forward(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
        overwrite: bool = False,
    ) -> Tensor:
        """residual + scale * moe(norm(x)): [T, H] -> [T, H]; the residual's memory is never taken."""
        del overwrite
        return self._mix(x if norm is None else norm(x), residual, scale)

    def _mix(self, h: Tensor, residual: Tensor | None, scale: float) -> Tensor:
        """residual + scale * moe(h)."""
        routes = self.ops.moe_route(self.gate(h), self.top_k, normalise=self.normalise)
        gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
        return self.ops.experts(h, gate_up, down, *routes, self.activation, residual=residual, scale=scale)


class SharedMoE(MoE):
    """The same with one more block that every token goes through, as far as a gate of its own opens (Qwen2-MoE)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        *,
        num_experts: int,
        top_k: int,
        normalise: bool,
        shared_size: int,
    ) -> None:
        super().__init__(
            hidden_size, intermediate_size, hidden_act, num_experts=num_experts, top_k=top_k, normalise=normalise
        )
        self.shared_expert = GatedMLP(hidden_size, shared_size, hidden_act)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def _mix(self, h: Tensor, residual: Tensor | None, scale: float) -> Tensor:
        opening = project(self.ops, h, (self.shared_expert_gate,)).sigmoid()
        return torch.addcmul(super()._mix(h, residual, scale), opening, self.shared_expert(h), value=scale)


class BiasedExperts(Experts):
    """As gpt-oss has them: inputs before outputs, gate and up column by column in turn, and biases."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, hidden_size, 2 * intermediate_size))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden_size))

    @property
    def biases(self) -> Biases:
        """Those of both products."""
        return Biases(self.gate_up_proj_bias, self.down_proj_bias)


class BiasedMoE(MoE):
    """A mixture of such experts with a clamped activation; a token's weights are a softmax over its own experts."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, num_experts: int, top_k: int) -> None:
        KernelModule.__init__(self)
        self.top_k = top_k
        self.router = Router(hidden_size, num_experts, bias=True)
        self.experts = BiasedExperts(hidden_size, intermediate_size, num_experts)

    def _mix(self, h: Tensor, residual: Tensor | None, scale: float) -> Tensor:
        routes = self.ops.moe_route(self.router(h), self.top_k, normalise=True)
        e, way = self.experts, {"biases": self.experts.biases, "interleaved": True}
        return self.ops.experts(
            h, e.gate_up_proj, e.down_proj, *routes, CLAMPED_SWIGLU, residual=residual, scale=scale, **way
        )


@contextmanager
def recorded_logits(model: nn.Module, wanted: bool = True) -> Iterator[list[Tensor]]:
    """What the model's routers say while the context is open, layer by layer: [T, E] each; nothing if not wanted."""
    found: list[Tensor] = []

    def record(module: nn.Module, args: object, logits: Tensor) -> None:
        found.append(logits)

    routers = [m for m in model.modules() if isinstance(m, Router)] if wanted else []
    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def balancing_loss(logits: Sequence[Tensor], top_k: int) -> Tensor:
    """E times the sum over experts of their share of the choices times their mean probability (arXiv 2101.03961, 2.2).

    Means are over all tokens and layers. Logits [T, E] of each layer; a float32 scalar, top_k where all is balanced.
    """
    rows = torch.cat([one.to(logits[0].device) for one in logits]).float()
    probabilities = rows.softmax(dim=-1)
    chosen = torch.zeros_like(rows).scatter_(1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    return (chosen.mean(0) * probabilities.mean(0)).sum() * rows.shape[1]
