"""The decoder stack and its language-model head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cuformers.nn.attention.backend import AttentionProblem, AttentionSpec, problem_of
from cuformers.nn.backbone import Backbone
from cuformers.nn.kernel_module import KernelModule
from cuformers.nn.loss import averaged, loss_of_logits, that_count
from cuformers.nn.norm import RMSNorm
from cuformers.nn.project import is_plain, project
from cuformers.nn.rope import RopeSpec, RotarySet
from cuformers.nn.step import Step


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """From the last hidden state to logits."""

    tied: bool
    """The head is the embedding matrix."""
    scale: float = 1.0
    """Multiplies the logits (Granite)."""
    softcap: float | None = None
    """Logits become softcap * tanh(logit / softcap) (Gemma 2)."""


class Decoder(Backbone):
    """Embedding, layers, and the final norm, which the head applies so that it can ride in the head's product.

    `embed_scale` multiplies the embeddings (Gemma, Granite), rounded to their dtype first.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        layers: Sequence[nn.Module],
        norm: RMSNorm,
        ropes: Mapping[str, RopeSpec],
        padding_idx: int | None = None,
        embed_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size, padding_idx)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.rotary = RotarySet(ropes)
        self.embed_scale = embed_scale

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer, in order."""
        return tuple(layer.self_attn.spec for layer in self.layers)  # type: ignore[union-attr]

    @property
    def embedding(self) -> nn.Embedding:
        return self.embed_tokens

    def forward(self, tokens: Tensor, step: Step) -> Tensor:
        """Tokens [T] -> hidden states [T, H], before the final norm."""
        step = replace(step, rope=self.rotary(step))
        x = self.embed_tokens(tokens)
        if self.embed_scale != 1.0:
            x = x * torch.tensor(self.embed_scale, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, step)
        return x

    def hidden_states(self, tokens: Tensor, step: Step, token_types: Tensor | None = None) -> Tensor:
        assert token_types is None, "decoders know no kinds of tokens"
        return self.norm(self(tokens, step))


class CausalLM(KernelModule):
    """A decoder with its head. Parameter names are the checkpoint's: model.*, lm_head.weight."""

    def __init__(self, decoder: Decoder, head: HeadSpec) -> None:
        super().__init__()
        self.model = decoder
        self.head = head
        embed = decoder.embed_tokens
        self.lm_head = nn.Linear(embed.embedding_dim, embed.num_embeddings, bias=False)
        if head.tied:
            self.lm_head.weight = embed.weight

    @property
    def attention_problem(self) -> AttentionProblem:
        """What this model asks of an attention backend, where it is now."""
        return problem_of(self.model.attention_specs, self.lm_head.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, H], before the final norm -> logits [T, vocab] in the model's dtype."""
        y = project(self.ops, hidden, (self.lm_head,), norm=self.model.norm, scale=self.head.scale)
        if self.head.softcap is not None:
            y = torch.tanh(y / self.head.softcap) * self.head.softcap
        return y

    def loss(self, hidden: Tensor, targets: Tensor, num_items: Tensor | int | None = None) -> Tensor:
        """Cross-entropy of the tokens that follow, without the logits of the whole batch: scalar, float32.

        They are made after all by deterministic kernels, whose loss is that of their own logits, and by a head that is
        more than its weight (an adapter, a hook).

        Args:
            hidden: [T, H], before the final norm.
            targets: [T], int64; -100 is ignored. Where they are on the CPU, tokens without one cost the head nothing.
            num_items: what the sum is divided by; None means the number of targets that count.
        """
        hidden, targets = that_count(hidden, targets)
        weight = self.lm_head.weight
        if self.ops.deterministic or not is_plain(self.lm_head) or weight.device != hidden.device:
            return loss_of_logits(self.logits(hidden), targets, num_items)
        x = self.model.norm(hidden)
        options = {"scale": self.head.scale, "softcap": self.head.softcap}
        total = self.ops.linear_cross_entropy(x, weight, targets, **options).total
        return averaged(total, targets, num_items)
