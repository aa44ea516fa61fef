"""Beam search over one prompt: which continuations go on, which are answers, and when it ends. Plain Python, no torch.

The rules are those of Transformers 5.17, prompt by prompt: there, too, nothing that one prompt does changes another's
answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter, itemgetter
from typing import NamedTuple

_HOPELESS = -1e9
"""Added to the score of a beam that is only there so that there are always as many; any other one beats it."""


class Beam(NamedTuple):
    """A continuation of the prompt."""

    tokens: tuple[int, ...]
    """What was generated."""
    score: float
    """Sum of the tokens' log-probabilities; of an answer, divided by its length to the power of the penalty."""
    origins: tuple[int, ...]
    """For each token, which of the running beams it was appended to."""


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """How to search."""

    num_beams: int
    """Beams that run, and answers that are kept."""
    num_eos: int
    """Tokens that end an answer; there are so many more candidates that as many beams as before always go on."""
    max_new_tokens: int
    """Tokens of the longest answer."""
    length_penalty: float = 1.0
    """Power of its length that an answer's score is divided by."""
    early_stopping: bool | str = False
    """True ends with `num_beams` answers. False and "never" end where no running beam promises a better one, judged by
    its present length or, for "never" and a positive penalty, by the longest."""

    @property
    def num_candidates(self) -> int:
        """Continuations that are looked at in each step."""
        return max(2, 1 + self.num_eos) * self.num_beams


class Beams:
    """The search for the answers to one prompt. A step is `candidates`, then `advance`."""

    def __init__(self, options: BeamOptions) -> None:
        self.options = options
        self.running = [Beam((), _HOPELESS if i else 0.0, ()) for i in range(options.num_beams)]
        """The beams to continue, best first; at the start all are the prompt, and only the first one counts."""
        self.answers: list[Beam] = []
        """Those that have ended, best first; `num_beams` of them when the search is done."""
        self.done = False

    def candidates(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> list[Beam]:
        """The best continuations by one token, best first.

        Args:
            likeliest: for each running beam its `num_candidates` likeliest tokens, with their log-probabilities.
        """
        found = [
            (beam.score + logprob, index, token)
            for index, (beam, best) in enumerate(zip(self.running, likeliest, strict=True))
            for token, logprob in best
        ]
        best = nlargest(self.options.num_candidates, found, key=itemgetter(0))
        return [
            Beam((*self.running[index].tokens, token), score, (*self.running[index].origins, index))
            for score, index, token in best
        ]

    def advance(self, candidates: Sequence[Beam], ended: Sequence[bool]) -> None:
        """Takes a step.

        Args:
            candidates: as `candidates` gave them.
            ended: which of them have ended; only among the first `num_beams` are they answers.
        """
        count = self.options.num_beams
        new = [self._answer(beam) for beam, end in zip(candidates[:count], ended) if end]
        self.answers = sorted([*self.answers, *new], key=attrgetter("score"), reverse=True)[:count]
        going = [beam for beam, end in zip(candidates, ended) if not end]
        going += [beam._replace(score=beam.score + _HOPELESS) for beam, end in zip(candidates, ended) if end]
        self.running = going[:count]
        self.done = all(ended) or (len(self.answers) == count and not self._goes_on())

    def _answer(self, beam: Beam) -> Beam:
        return beam._replace(score=beam.score / len(beam.tokens) ** self.options.length_penalty)

    def _goes_on(self) -> bool:
        """Whether the best running beam may still become better than the worst answer."""
        options, best = self.options, self.running[0]
        if options.early_stopping is True:
            return False
        longest = options.early_stopping == "never" and options.length_penalty > 0
        length = options.max_new_tokens if longest else len(best.tokens)
        return best.score / length**options.length_penalty > self.answers[-1].score
