"""Op `logprobs`: log-probabilities of chosen tokens, their ranks, and each row's likeliest tokens.

    logprobs(logits [R, V], tokens [R] int64, top: int) -> Logprobs

The natural log-softmax in float32, of logits in any float dtype, without a copy of them in float32 and without a sort
over the vocabulary. `top` is 0 to 32, and V at most; tokens are below V. A row whose token is negative is skipped: all
its results are 0.

Logits of -inf have log-probability -inf. As in torch.log_softmax a row with a NaN, with +inf, or with nothing but -inf
has NaN for every log-probability; its ranks and ids still follow the order, in which NaN counts as -inf.
"""

from typing import NamedTuple

from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.kernels.op import two_ways

MAX_TOP = 32


class Logprobs(NamedTuple):
    """What is known about one token of each row, and about the likeliest ones."""

    chosen: Tensor
    """[R], float32: log-probability of the row's token."""
    rank: Tensor
    """[R], int32: tokens with a larger logit; 0 is the best."""
    values: Tensor
    """[R, top], float32: log-probabilities of the likeliest tokens, larger first."""
    ids: Tensor
    """[R, top], int64: those tokens; of equal ones the smaller id is first."""


def check_top(top: int, num_tokens: int) -> None:
    """Raises ValueError where a row can't have so many likeliest tokens."""
    most = min(MAX_TOP, num_tokens)
    if not 0 <= top <= most:
        raise bad_argument("top", top, f"0 to {most}", "Ask for fewer log-probabilities.")


OP = two_ways(__name__, "logprobs")
