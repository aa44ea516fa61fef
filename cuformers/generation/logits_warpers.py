"""Transformers' warper classes: the filters of warpers.py with their parameters."""

import math
from collections.abc import Callable

from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.generation import warpers
from cuformers.generation.processors import RowProcessor
from cuformers.generation.rows import Rows


def check_number(name: str, value: float, allowed: str, holds: bool, remedy: str = "") -> float:
    """The value, or a ValueError where it does not hold."""
    if isinstance(value, bool) or not holds:
        raise bad_argument(name, value, allowed, remedy)
    return value


class TemperatureLogitsWarper(RowProcessor):
    """Divides the scores by `temperature`, above 0."""

    def __init__(self, temperature: float) -> None:
        remedy = "For greedy decoding set do_sample=False."
        self.temperature = check_number("temperature", temperature, "a number above 0", temperature > 0, remedy)

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return warpers.temperature(scores, self.temperature)


class _Filter(RowProcessor):
    """A warper that removes tokens: one parameter, the value that removed tokens get, how many stay at least."""

    _apply: staticmethod

    def __init__(self, value: float, filter_value: float, min_tokens_to_keep: int) -> None:
        keep = min_tokens_to_keep
        check_number("min_tokens_to_keep", keep, "an integer from 1", isinstance(keep, int) and keep >= 1)
        self.value, self.filter_value, self.min_tokens_to_keep = value, filter_value, keep

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        function: Callable[..., Tensor] = self._apply
        return function(scores, self.value, fill=self.filter_value, keep=self.min_tokens_to_keep)


class TopKLogitsWarper(_Filter):
    """Keeps the `top_k` likeliest tokens, and those that tie with the last of them."""

    _apply = staticmethod(warpers.top_k)

    def __init__(self, top_k: int, filter_value: float = -math.inf, min_tokens_to_keep: int = 1) -> None:
        check_number("top_k", top_k, "an integer from 1", isinstance(top_k, int) and top_k >= 1)
        super().__init__(top_k, filter_value, min_tokens_to_keep)


class TopPLogitsWarper(_Filter):
    """Keeps the smallest set of likeliest tokens whose probabilities sum up to `top_p`."""

    _apply = staticmethod(warpers.top_p)

    def __init__(self, top_p: float, filter_value: float = -math.inf, min_tokens_to_keep: int = 1) -> None:
        check_number("top_p", top_p, "a number from 0 to 1", 0 <= top_p <= 1)
        super().__init__(float(top_p), filter_value, min_tokens_to_keep)


class MinPLogitsWarper(_Filter):
    """Keeps tokens at least `min_p` times as likely as the likeliest."""

    _apply = staticmethod(warpers.min_p)

    def __init__(self, min_p: float, filter_value: float = -math.inf, min_tokens_to_keep: int = 1) -> None:
        check_number("min_p", min_p, "a number from 0 to 1", 0 <= min_p <= 1)
        super().__init__(float(min_p), filter_value, min_tokens_to_keep)


class TypicalLogitsWarper(_Filter):
    """Keeps the most locally typical tokens that hold the probability `mass`."""

    _apply = staticmethod(warpers.typical)

    def __init__(self, mass: float = 0.9, filter_value: float = -math.inf, min_tokens_to_keep: int = 1) -> None:
        check_number("mass", mass, "a number between 0 and 1", 0 < mass < 1)
        super().__init__(float(mass), filter_value, min_tokens_to_keep)


class EpsilonLogitsWarper(_Filter):
    """Keeps tokens of probability at least `epsilon`."""

    _apply = staticmethod(warpers.epsilon)

    def __init__(self, epsilon: float, filter_value: float = -math.inf, min_tokens_to_keep: int = 1) -> None:
        check_number("epsilon", epsilon, "a number between 0 and 1", 0 < epsilon < 1)
        super().__init__(float(epsilon), filter_value, min_tokens_to_keep)


class EtaLogitsWarper(_Filter):
    """Keeps tokens above a cutoff that sinks where the distribution is flat; `device` is not needed here."""

    _apply = staticmethod(warpers.eta)

    def __init__(
        self, epsilon: float, filter_value: float = -math.inf, min_tokens_to_keep: int = 1, device: object = None
    ) -> None:
        check_number("epsilon", epsilon, "a number between 0 and 1", 0 < epsilon < 1)
        super().__init__(float(epsilon), filter_value, min_tokens_to_keep)


class TopHLogitsWarper(RowProcessor):
    """Keeps the likeliest tokens that hold the share `top_h` of the distribution's entropy."""

    def __init__(self, top_h: float, filter_value: float = -math.inf) -> None:
        self.top_h = check_number("top_h", top_h, "a number above 0, up to 1", 0 < top_h <= 1)
        self.filter_value = filter_value

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return warpers.top_h(scores, self.top_h, fill=self.filter_value)


class LogitNormalization(RowProcessor):
    """Makes the scores log-probabilities."""

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return scores.log_softmax(dim=-1)
