"""penalize: the reference is what the logits processors do, row by row, to the bit."""

import math

import pytest
import torch

from cuformers.generation import logits_lengths, logits_processors
from cuformers.generation.processors import LogitsProcessorList
from cuformers.generation.rows import Rows
from cuformers.kernels.penalize.reference import penalize

from .penalty_cases import BIASES, EOS, OPTIONS, Batch


def processors(row: int, prompt: int) -> LogitsProcessorList:
    """Those of one row, in the order of `build_processors`."""
    repetition, frequency, presence, least = OPTIONS[row]
    banned = [[token] for token, bias in BIASES[row].items() if bias == -math.inf]
    biases = {(token,): bias for token, bias in BIASES[row].items() if bias != -math.inf}
    made: list = [
        logits_processors.SequenceBiasLogitsProcessor(biases) if biases else None,
        logits_processors.RepetitionPenaltyLogitsProcessor(repetition),
        logits_processors.FrequencyPenaltyLogitsProcessor(frequency, prompt),
        logits_processors.PresencePenaltyLogitsProcessor(presence, prompt),
        logits_processors.NoBadWordsLogitsProcessor(banned) if banned else None,
        logits_lengths.MinNewTokensLengthLogitsProcessor(prompt, least, [i for i in EOS[row] if i >= 0]),
    ]
    return LogitsProcessorList(p for p in made if p is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_what_the_processors_do(dtype: torch.dtype) -> None:
    batch = Batch(50, 100, dtype, torch.device("cpu"))
    scores = penalize(*batch.arguments)
    assert scores.dtype == torch.float32
    for place, row in enumerate(batch.rows.tolist()):
        plain = batch.logits[place : place + 1].float()
        if row < 0:
            assert torch.equal(scores[place : place + 1], plain)
            continue
        rows = Rows(batch.history[row : row + 1, : batch.lengths[place]])
        want = processors(row, int(batch.prompts[row])).process(rows, plain)
        assert torch.equal(scores[place : place + 1], want), (row, (scores[place] - want[0]).abs().max())
        assert not torch.equal(want, plain) or row == 0


def test_what_lies_behind_a_row_is_not_looked_at() -> None:
    batch = Batch(50, 100, torch.float32, torch.device("cpu"))
    scores = penalize(*batch.arguments)
    longest = torch.zeros(len(OPTIONS), dtype=torch.int32)
    longest.scatter_reduce_(0, batch.rows.clamp(min=0).long(), batch.lengths, "amax")
    for row, length in enumerate(longest.tolist()):
        batch.history[row, length:] = -7
    assert torch.equal(penalize(*batch.arguments), scores)
