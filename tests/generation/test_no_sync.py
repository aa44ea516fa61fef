"""No processor waits for the device: none asks for a tensor's value or for a shape that depends on one."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cuformers import generation as ours
from cuformers.generation import Rows

from .oracle import random_ids, random_scores

WAITING = {
    "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::is_nonzero",
    "aten::equal", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave",
    "aten::multinomial", "aten::bincount",
}  # fmt: skip
EOS = [2, 9]
PROCESSORS: list[Callable[[], ours.RowProcessor]] = [
    lambda: ours.TemperatureLogitsWarper(0.7),
    lambda: ours.TopKLogitsWarper(5),
    lambda: ours.TopPLogitsWarper(0.8),
    lambda: ours.MinPLogitsWarper(0.1, min_tokens_to_keep=2),
    lambda: ours.TypicalLogitsWarper(0.5),
    lambda: ours.EpsilonLogitsWarper(0.01),
    lambda: ours.EtaLogitsWarper(0.01),
    lambda: ours.TopHLogitsWarper(0.5),
    lambda: ours.LogitNormalization(),
    lambda: ours.InfNanRemoveLogitsProcessor(),
    lambda: ours.RepetitionPenaltyLogitsProcessor(1.3, 1),
    lambda: ours.PresencePenaltyLogitsProcessor(0.5, 2),
    lambda: ours.FrequencyPenaltyLogitsProcessor(0.5, 2),
    lambda: ours.NoRepeatNGramLogitsProcessor(2),
    lambda: ours.SequenceBiasLogitsProcessor({(1,): 2.0, (2, 3): 1.0, (3, 3): -math.inf}),
    lambda: ours.NoBadWordsLogitsProcessor([[1], [2, 3]], EOS),
    lambda: ours.SuppressTokensLogitsProcessor([1]),
    lambda: ours.SuppressTokensAtBeginLogitsProcessor([1], 4),
    lambda: ours.MinLengthLogitsProcessor(9, EOS),
    lambda: ours.MinNewTokensLengthLogitsProcessor(2, 9, EOS),
    lambda: ours.ForcedBOSTokenLogitsProcessor(1),
    lambda: ours.ForcedEOSTokenLogitsProcessor(7, EOS, max_new_tokens=3),
    lambda: ours.ExponentialDecayLengthPenalty((1, 1.5), EOS, 2),
]


class Watch(TorchDispatchMode):
    """Collects the operators that would wait for a GPU; an index by booleans is one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        indices = args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        if name in WAITING or any(i is not None and i.dtype == torch.bool for i in indices):
            self.waits.append(name)
        return function(*args, **(kwargs or {}))


def inputs(device: str) -> list[Rows]:
    ids = random_ids(3, 6, vocab=10).to(device)
    lengths, prompts = (torch.tensor(n).to(device) for n in ([6, 3, 1], [4, 1, 1]))
    return [Rows(ids), Rows(ids, lengths), Rows(ids, lengths, prompts)]


@pytest.mark.parametrize("make", PROCESSORS)
def test_asks_for_no_value(make: Callable) -> None:
    processor, scores = make(), random_scores(3)
    processor.process(inputs("cpu")[0], scores)  # tables are laid out in the first call
    with Watch() as watch:
        for rows in inputs("cpu"):
            processor.process(rows, scores)
    assert watch.waits == []


def test_the_watch_sees() -> None:
    x = torch.arange(4)
    with Watch() as watch:
        x[x > 2].sum().item()
        x.nonzero()
    assert {"aten::index", "aten::_local_scalar_dense", "aten::nonzero"} <= set(watch.waits)


@pytest.mark.gpu
@pytest.mark.parametrize("make", PROCESSORS)
def test_does_not_wait_and_is_captured(make: Callable) -> None:
    processor, scores = make(), random_scores(3)
    on_gpu = scores.cuda()
    for rows, cpu_rows in zip(inputs("cuda"), inputs("cpu")):
        want = processor.process(cpu_rows, scores)
        processor.process(rows, on_gpu)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = processor.process(rows, on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = processor.process(rows, on_gpu)
        graph.replay()
        for found in (got, captured):
            torch.testing.assert_close(found.cpu(), want, rtol=1e-5, atol=1e-5)
