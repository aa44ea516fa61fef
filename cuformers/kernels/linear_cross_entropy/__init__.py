"""Op `linear_cross_entropy`: the head's product and each token's loss, without the logits of all tokens in memory.

    linear_cross_entropy(x [T, H], weight [V, H], labels [T] int64, weights [T] float32 | None = None, *,
                         scale=1.0, softcap=None, ignore_index=-100, entropy=False, ahead=True) -> TokenLosses

x and weight share one dtype; under autocast both are cast to its dtype, as a linear layer's are. A token's logits are
z = scale * (weight @ x), then softcap * tanh(z / softcap) where there is a softcap. The product is rounded to the dtype
of x, as a linear layer's is; all that follows is float32.

Nothing is divided by a number of tokens: that is the caller's. A token with label ignore_index counts for nothing: its
loss, entropy and gradient are 0. Other labels outside of 0 to V - 1 are a ValueError where the labels are on the CPU;
on a GPU, which is not waited for, such a token's loss and entropy are NaN, and so is the total.

All results have gradients, in any combination, to x, weight and weights. The total's is formed in the forward pass,
from logits that are there anyway, and its backward pass only multiplies by the gradient that comes in, a scalar. A
gradient that comes to nll or entropy, which may differ from token to token, has the logits computed anew. ahead=False
does the latter for the total too: right where only nll or entropy will be differentiated.
"""

from typing import NamedTuple

from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.kernels.op import two_ways


class TokenLosses(NamedTuple):
    """What a model thinks of each label."""

    total: Tensor
    """Scalar, float32: the sum of weights * nll, or of nll where no weights are given."""
    nll: Tensor
    """[T], float32: minus the natural logarithm of the label's probability."""
    entropy: Tensor | None
    """[T], float32: of the token's distribution, in nats; None where it was not asked for."""


def check_labels(labels: Tensor, num_tokens: int, ignore_index: int = -100) -> None:
    """Raises ValueError where labels on the CPU are not tokens; labels on a GPU are not looked at."""
    if labels.is_floating_point() or labels.dim() != 1:
        raise bad_argument("labels", f"{labels.dtype} of shape {tuple(labels.shape)}", "integers of shape [T]")
    if labels.device.type != "cpu":
        return
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= num_tokens))]
    if len(wrong):
        allowed = f"tokens from 0 to {num_tokens - 1}, or {ignore_index} for what counts for nothing"
        raise bad_argument("labels", wrong[0].item(), allowed)


OP = two_ways(__name__, "linear_cross_entropy", modes=frozenset({"infer", "train"}))
