"""The rules of beam search, against every continuation there is."""

import itertools
import math
import random

import pytest

from cuformers.generation.beams import Beam, BeamOptions, Beams

VOCAB, EOS = 5, 0
Table = dict[tuple[int, ...], list[float]]


class Language:
    """Log-probabilities of the next of VOCAB tokens after any tokens, fixed by a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def next(self, tokens: tuple[int, ...]) -> list[float]:
        draw = random.Random(hash((self._seed, tokens)))
        weights = [math.exp(draw.gauss(0, 1.5)) for _ in range(VOCAB)]
        return [math.log(w / sum(weights)) for w in weights]

    def score(self, tokens: tuple[int, ...]) -> float:
        return sum(self.next(tokens[:i])[token] for i, token in enumerate(tokens))


def search(language: Language, options: BeamOptions) -> tuple[Beams, int]:
    """The search, and its steps."""
    beams = Beams(options)
    for step in itertools.count(1):
        likeliest = [
            sorted(enumerate(language.next(b.tokens)), key=lambda pair: -pair[1])[: options.num_candidates]
            for b in beams.running
        ]
        candidates = beams.candidates(likeliest)
        assert [c.score for c in candidates] == sorted((c.score for c in candidates), reverse=True)
        beams.advance(candidates, [c.tokens[-1] == EOS or len(c.tokens) == options.max_new_tokens for c in candidates])
        assert len(beams.running) == options.num_beams
        if beams.done:
            return beams, step
    raise AssertionError


def options(num_beams: int, **more) -> BeamOptions:
    return BeamOptions(num_beams=num_beams, num_eos=1, **{"max_new_tokens": 4, **more})


def every_answer(longest: int) -> list[tuple[int, ...]]:
    """All there are: ended by EOS, or by length."""
    texts = (t for n in range(1, longest + 1) for t in itertools.product(range(VOCAB), repeat=n))
    return [t for t in texts if EOS not in t[:-1] and (t[-1] == EOS or len(t) == longest)]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_beams_for_all_continuations_find_the_best_answers(seed: int, penalty: float) -> None:
    language, longest = Language(seed), 3
    wide = options(VOCAB**longest, max_new_tokens=longest, length_penalty=penalty, early_stopping="never")
    beams, _ = search(language, wide)
    answers = every_answer(longest)
    expected = sorted(answers, key=lambda t: language.score(t) / len(t) ** penalty, reverse=True)
    found = [a for a in beams.answers if a.score > -1e6]  # more beams than answers: the rest is the same ones again
    assert [a.tokens for a in found] == expected
    for answer in found:
        assert answer.score == pytest.approx(language.score(answer.tokens) / len(answer.tokens) ** penalty)


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("seed", range(10))
def test_answers_are_what_was_searched(seed: int, early: bool | str) -> None:
    language = Language(seed)
    beams, _ = search(language, options(3, max_new_tokens=6, early_stopping=early))
    assert len(beams.answers) == 3 and len({a.tokens for a in beams.answers}) == 3
    assert [a.score for a in beams.answers] == sorted((a.score for a in beams.answers), reverse=True)
    for answer in beams.answers:
        assert answer.score == pytest.approx(language.score(answer.tokens) / len(answer.tokens))
        assert answer.tokens[-1] == EOS or len(answer.tokens) == 6
        assert len(answer.origins) == len(answer.tokens) and answer.origins[0] == 0 and set(answer.origins) <= {0, 1, 2}


def test_each_way_to_stop_looks_further() -> None:
    ways = (True, False, "never")
    found = [[search(Language(s), options(2, max_new_tokens=9, early_stopping=w)) for w in ways] for s in range(40)]
    steps = [[n for _, n in row] for row in found]
    assert all(a <= b <= c for a, b, c in steps)
    assert any(a < b for a, b, _ in steps) and any(b < c for _, b, c in steps)
    best = [[beams.answers[0].score for beams, _ in row] for row in found]
    assert all(a <= b <= c for a, b, c in best) and any(a < c for a, _, c in best)


def test_only_the_first_candidates_become_answers() -> None:
    beams = Beams(options(2))
    candidates = [Beam((1,), -1.0, (0,)), Beam((2,), -2.0, (0,)), Beam((EOS,), -3.0, (0,)), Beam((3,), -4.0, (0,))]
    beams.advance(candidates, [False, False, True, False])
    assert beams.answers == [] and beams.running == candidates[:2] and not beams.done
    beams = Beams(options(2))
    beams.advance(candidates, [False, True, True, False])
    assert beams.answers == [candidates[1]] and beams.running == [candidates[0], candidates[3]]


def test_where_too_few_go_on_the_others_lose_to_any_that_does() -> None:
    beams = Beams(options(2))
    beams.advance([Beam((t,), -1.0 - t, (0,)) for t in range(4)], [True, False, True, True])
    first, second = beams.running
    assert first == Beam((1,), -2.0, (0,)) and second.tokens == (0,) and second.score < -1e8
    after = beams.candidates([[(1, -90.0), (2, -95.0)], [(1, -0.1), (2, -0.2)]])
    assert [c.tokens for c in after] == [(1, 1), (1, 2), (0, 1), (0, 2)]


def test_it_ends_where_nothing_goes_on() -> None:
    beams = Beams(options(2, early_stopping="never"))
    beams.advance([Beam((t,), -1.0 - t, (0,)) for t in range(4)], [True] * 4)
    assert beams.done and [a.tokens for a in beams.answers] == [(0,), (1,)]
