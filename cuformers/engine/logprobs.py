"""What requests are told about their tokens: log-probabilities of the model's own logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.cuda import streams
from cuformers.engine.plan import Chunk
from cuformers.engine.request import Request
from cuformers.kernels.logprobs import Logprobs
from cuformers.nn.decoder import CausalLM

TOP_LOGPROBS = (0, 8, 32)
"""Numbers of likeliest tokens that steps report; a request gets as many of them as it asked for."""
SLICE = 512
"""Places of a stream whose logits exist at once: 0.26 GB in float32 for 128k tokens."""


class Stretch(NamedTuple):
    """A part of a request's prompt that a step tells of."""

    request: Request
    start: int
    """Index of its first token in the prompt, at least 1."""
    count: int
    """Tokens, at least one."""


@dataclass(frozen=True, kw_only=True)
class PromptTargets:
    """Places of a step's stream, and for each the token of a prompt that comes after it."""

    places: Tensor
    """[P], int64."""
    tokens: Tensor
    """[P], int64."""
    top: int
    """Likeliest tokens to report of each."""
    stretches: tuple[Stretch, ...]
    """Who is told, in the order of the places."""


def check_wanted(request: Request, vocab_size: int) -> None:
    """Raises ValueError where a request wants more likeliest tokens than steps report, or than there are."""
    most = min(TOP_LOGPROBS[-1], vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(request, name)
        if wanted is not None and not (type(wanted) is int and 0 <= wanted <= most):
            raise bad_argument(name, wanted, f"None, or 0 to {most}", "Ask for fewer of the likeliest tokens.")


def top_size(wanted: int) -> int:
    """The number of likeliest tokens that a step reports where a request wants so many, or all that there are."""
    return next(size for size in TOP_LOGPROBS if size >= wanted)


def prompt_targets(chunks: Sequence[Chunk], device: torch.device) -> PromptTargets | None:
    """What a step of these chunks has to tell about prompts; None where nobody asks."""
    places: list[int] = []
    tokens: list[int] = []
    stretches, offset = [], 0
    for chunk in chunks:
        request, first = chunk.request, chunk.start + 1
        end = min(first + chunk.count, len(request.prompt))
        if request.prompt_logprobs is not None and end > max(first, len(request.prompt_token_logprobs)):
            places += range(offset, offset + end - first)
            tokens += request.prompt[first:end]
            stretches.append(Stretch(request, first, end - first))
        offset += chunk.count
    if not stretches:
        return None
    return PromptTargets(
        places=streams.upload(places, torch.int64, device),
        tokens=streams.upload(tokens, torch.int64, device),
        top=top_size(max(stretch.request.prompt_logprobs or 0 for stretch in stretches)),
        stretches=tuple(stretches),
    )


def score_prompts(model: CausalLM, hidden: Tensor, targets: PromptTargets) -> Logprobs:
    """The log-probabilities [P] of the targets, by hidden states [T, H]; the logits of a slice exist at once."""
    slices = zip(targets.places.split(SLICE), targets.tokens.split(SLICE))
    top = min(targets.top, model.lm_head.out_features)
    parts = [model.ops.logprobs(model.logits(hidden[places]), tokens, top) for places, tokens in slices]
    return Logprobs(*(torch.cat(column) for column in zip(*parts)))


def report_prompts(stretches: Sequence[Stretch], logprobs: Logprobs) -> None:
    """Tells requests about their prompts; one that computed a part of it again hears of it once."""
    offset = 0
    for request, start, count in stretches:
        known = len(request.prompt_token_logprobs) - start
        if request.finish is None:
            fresh = slice(offset + known, offset + count)
            request.prompt_token_logprobs += logprobs.chosen[fresh].tolist()
            request.prompt_top_logprobs += _likeliest(logprobs, fresh, request.prompt_logprobs or 0)
        offset += count


def report(request: Request, logprobs: Logprobs, index: int, top: int) -> None:
    """Tells a request about one sampled token."""
    request.token_logprobs.append(float(logprobs.chosen[index]))
    request.top_logprobs += _likeliest(logprobs, slice(index, index + 1), top)


def _likeliest(logprobs: Logprobs, rows: slice, top: int) -> list[list[tuple[int, float]]]:
    ids, values = logprobs.ids[rows, :top].tolist(), logprobs.values[rows, :top].tolist()
    return [list(zip(*row)) for row in zip(ids, values)]
