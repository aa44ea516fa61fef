"""The three layer shapes of today's dense decoders: where the norms stand."""

from torch import Tensor, nn

from cuformers.kernels.linear import rides
from cuformers.nn.attention.block import Attention
from cuformers.nn.mlp import GatedMLP
from cuformers.nn.moe import MoE
from cuformers.nn.norm import RMSNorm
from cuformers.nn.step import Step


class PreNormLayer(nn.Module):
    """x + scale * attn(norm(x)), then x + scale * mlp(norm(x)): Llama and most others.

    `residual_scale` is Granite's multiplier of what a block adds to the stream.
    """

    def __init__(
        self, attn: Attention, mlp: GatedMLP | MoE, hidden: int, eps: float, residual_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.self_attn = attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.residual_scale = residual_scale

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        scale, norm = self.residual_scale, self.post_attention_layernorm
        if rides(x.shape[0]) or scale != 1.0 or norm.ops.deterministic:
            x = self.self_attn(x, step, norm=self.input_layernorm, residual=x, scale=scale)
            return self.mlp(x, norm=norm, residual=x, scale=scale)
        h, x = norm.of_sum(self.self_attn(x, step, norm=self.input_layernorm), x)
        return self.mlp(h, residual=x, overwrite=True)


class PostNormLayer(nn.Module):
    """x + norm(attn(x)), then x + norm(mlp(x)): OLMo 2 (arXiv 2501.00656)."""

    def __init__(self, attn: Attention, mlp: GatedMLP, hidden: int, eps: float) -> None:
        super().__init__()
        self.self_attn = attn
        self.mlp = mlp
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        x = self.post_attention_layernorm.added_to(x, self.self_attn(x, step))
        return self.post_feedforward_layernorm.added_to(x, self.mlp(x))


class SandwichLayer(nn.Module):
    """x + norm(attn(norm(x))), then x + norm(mlp(norm(x))): Gemma 2 and 3, whose norms have offset 1."""

    def __init__(self, attn: Attention, mlp: GatedMLP, hidden: int, eps: float, offset: float = 1.0) -> None:
        super().__init__()
        self.self_attn = attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(hidden, eps, offset)
        self.post_attention_layernorm = RMSNorm(hidden, eps, offset)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps, offset)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps, offset)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        attended = self.self_attn(x, step, norm=self.input_layernorm)
        x = self.post_attention_layernorm.added_to(x, attended)
        fed = self.mlp(x, norm=self.pre_feedforward_layernorm)
        return self.post_feedforward_layernorm.added_to(x, fed)
