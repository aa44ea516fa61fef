"""A stack of mixers, with nothing between them."""

from torch import Tensor, nn

from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.decoder import Decoder
from cuformers.nn.norm import RMSNorm
from cuformers.nn.state_space.mixer import Mixer
from cuformers.nn.step import Step


class MixerLayer(nn.Module):
    """x + mixer(norm(x)); the norm's result has the weights' dtype, whatever x has."""

    def __init__(self, mixer: Mixer, hidden: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, eps)
        self.mixer = mixer

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        return x + self.mixer(self.norm(x).to(self.norm.weight.dtype), step)


class StateSpaceDecoder(Decoder):
    """Embedding, mixers, and the final norm, which the head applies.

    With `residual_in_fp32` the sum that goes through the layers is float32, and is rounded before the final norm.
    """

    def __init__(
        self, *, vocab_size: int, hidden_size: int, layers: list[MixerLayer], norm: RMSNorm, residual_in_fp32: bool
    ) -> None:
        super().__init__(vocab_size=vocab_size, hidden_size=hidden_size, layers=layers, norm=norm, ropes={})
        self.residual_in_fp32 = residual_in_fp32

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return ()

    def forward(self, tokens: Tensor, step: Step) -> Tensor:
        embedded = self.embed_tokens(tokens)
        x = embedded.float() if self.residual_in_fp32 else embedded
        for layer in self.layers:
            x = layer(x, step)
        return x.to(embedded.dtype)
