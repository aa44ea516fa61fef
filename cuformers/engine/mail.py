"""What steps say to the host, which reads it when it gets to it."""

from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.cuda import streams
from cuformers.engine.logprobs import Stretch
from cuformers.engine.request import Request
from cuformers.engine.runner import Output
from cuformers.kernels.logprobs import Logprobs


class Owner(NamedTuple):
    """Whose a row of a step is."""

    index: int
    request: Request
    counted: int
    """Tokens by which the planner thinks the request to go on."""
    target: int
    """Of the request when the step began: it is another one once the request is computed anew."""


class Letter(NamedTuple):
    """What one step said, once `done` is past."""

    tokens: Tensor
    """[R, K] of each of the step's rows, -1 after the last one; in a slot that later steps use again."""
    done: streams.Event
    owners: list[Owner]
    """Of the rows that matter."""
    logprobs: Logprobs | None
    stretches: tuple[Stretch, ...]
    """Of prompts that the step tells of."""
    prompt_logprobs: Logprobs | None


class Mail:
    """Letters of one engine; their events are used again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[streams.Event] = []

    def send(self, output: Output, owners: list[Owner], stretches: tuple[Stretch, ...]) -> Letter:
        """The letter of a step that has just been launched."""
        assert output.posted is not None, "a step that has sampled"
        logprobs, prompts = _downloaded(output.logprobs), _downloaded(output.prompt_logprobs)
        done = self._free.pop() if self._free else streams.event(self._device)
        done.record()
        tokens = output.posted.view(output.posted.shape[0], -1)
        return Letter(tokens, done, owners, logprobs, stretches, prompts)

    def read(self, letter: Letter) -> list[list[int]]:
        """Waits for a letter: its tokens by row. Its other tensors are good as long as it is kept."""
        letter.done.synchronize()
        self._free.append(letter.done)
        return letter.tokens.tolist()


def _downloaded(logprobs: Logprobs | None) -> Logprobs | None:
    return None if logprobs is None else Logprobs(*(streams.download(x) for x in logprobs))
