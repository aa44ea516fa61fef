"""The gated feed-forward block: down(act(gate(x)) * up(x)) (arXiv 2002.05202)."""

from collections.abc import Callable

from torch import Tensor, nn

from cuformers.base.errors import bad_argument
from cuformers.kernels.activation import activation_function
from cuformers.nn.kernel_module import KernelModule
from cuformers.nn.norm import RMSNorm
from cuformers.nn.project import one_map, project

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""config.json's `hidden_act` -> the op's activation."""


def activation_name(hidden_act: str) -> str:
    """The op's name of config.json's activation.

    Raises:
        ValueError: one that we don't have.
    """
    if hidden_act not in ACTIVATIONS:
        raise bad_argument("hidden_act", hidden_act, f"one of {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[hidden_act]


def activation(hidden_act: str) -> Callable[[Tensor], Tensor]:
    """config.json's activation as a function; errors as of `activation_name`."""
    return activation_function(activation_name(hidden_act))


class GatedMLP(KernelModule):
    """Gate and up are one product where their storage allows; the activation rides in its epilogue."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation_name(hidden_act)
        self.intermediate_size = intermediate_size
        self._make_input(hidden_size, intermediate_size, bias)
        self._make_output(hidden_size, intermediate_size, bias)

    def _make_input(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)

    def _make_output(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    @property
    def output(self) -> nn.Module:
        """The map back to the stream."""
        return self.down_proj

    @property
    def leaves(self) -> tuple[nn.Module, ...]:
        """The maps whose outputs are gate, then up."""
        return self.gate_proj, self.up_proj

    def storage_groups(self) -> tuple[tuple[str, ...], ...]:
        """Parameters to lay out one after the other, so that they can be used as one."""
        groups = (("gate_proj.weight", "up_proj.weight"), ("gate_proj.bias", "up_proj.bias"))
        return groups if self.down_proj.bias is not None else groups[:1]

    def forward(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
        overwrite: bool = False,
    ) -> Tensor:
        """residual + scale * mlp(norm(x)): [T, H] -> [T, H]; for `overwrite` see `project`."""
        one = one_map(self.ops, self.leaves)
        if one is not None:
            weight, bias = one
            args = norm.args if norm is not None else None
            h = self.ops.gated_linear(x, weight, bias, self.activation, norm=args)
        else:
            h = self.ops.gated_activation(project(self.ops, x, self.leaves, norm=norm), self.activation)
        return project(self.ops, h, (self.output,), residual=residual, scale=scale, overwrite=overwrite)


class PackedMLP(GatedMLP):
    """The same with gate and up as one parameter in the checkpoint (Phi-3)."""

    def _make_input(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)

    @property
    def leaves(self) -> tuple[nn.Module, ...]:
        return (self.gate_up_proj,)

    def storage_groups(self) -> tuple[tuple[str, ...], ...]:
        return ()
