"""What of a request's options the device's ops do by themselves, row by row and inside a captured step."""

import math
from typing import NamedTuple

from cuformers.generation.bans import check_vocabulary
from cuformers.generation.resolved import ResolvedGeneration

MAX_BIASED = 512
"""Tokens of one request that may be biased or banned by the op."""


class FusedWarpers(NamedTuple):
    """What the device's sampling op is to be given, and whether filters must run before it."""

    temperature: float
    """0: greedy."""
    top_k: int
    """0: off."""
    top_p: float
    """1: off."""
    min_p: float
    """0: off."""
    eager: tuple[str, ...]
    """Options that the sampling op can't take. Not empty: all filters are in `build_processors(..., fused=False)`."""


class FusedPenalties(NamedTuple):
    """What the op `penalize` is to be given, and whether processors must run in its place."""

    repetition: float = 1.0
    """1: off."""
    frequency: float = 0.0
    """0: off."""
    presence: float = 0.0
    """0: off."""
    min_new_tokens: int = 0
    """0: off."""
    bias: tuple[tuple[int, float], ...] = ()
    """(token, bias), each token once; -inf bans it."""
    eager: tuple[str, ...] = ()
    """Options that the op can't take. Not empty: the others are off here, and all are processors."""


def fused_warpers(resolved: ResolvedGeneration) -> FusedWarpers:
    """Which filters the sampling op can do by itself.

    The op does temperature, top_k, top_p, min_p in this order and then draws. Where another filter has to come in
    between or after, or scores are to be returned, all of them run as processors and the op only draws.
    """
    if not resolved.do_sample:
        return FusedWarpers(0.0, 0, 1.0, 0.0, ())
    active = {
        "top_h": resolved.top_h is not None,
        "typical_p": resolved.typical_p < 1,
        "epsilon_cutoff": 0 < resolved.epsilon_cutoff < 1,
        "eta_cutoff": 0 < resolved.eta_cutoff < 1,
        "output_scores": resolved.output_scores,
    }
    eager = tuple(name for name, on in active.items() if on)
    if eager:
        return FusedWarpers(1.0, 0, 1.0, 0.0, eager)
    return FusedWarpers(resolved.temperature, resolved.top_k, resolved.top_p, resolved.min_p, ())


def fused_penalties(resolved: ResolvedGeneration) -> FusedPenalties:
    """Which penalties, biases and bans the op `penalize` can do by itself: all that are asked for, or none.

    The op adds biases, then penalizes, then bans, which is Transformers' order of these options; a ban, -inf, is the
    same before the penalties as after them. What else changes scores comes after them or in between, and takes
    processors.
    """
    bias = _bias(resolved)
    active = {
        "no_repeat_ngram_size": resolved.no_repeat_ngram_size > 0,
        "sequence_bias": any(len(ids) > 1 for ids, _ in resolved.sequence_bias),
        "bad_words_ids": any(len(ids) > 1 for ids in bad_words(resolved)),
        "begin_suppress_tokens": bool(resolved.begin_suppress_tokens),
        "forced_bos_token_id": resolved.forced_bos_token_id is not None,
        "forced_eos_token_id": bool(resolved.forced_eos_token_ids),
        "exponential_decay_length_penalty": resolved.exponential_decay_length_penalty is not None,
        "remove_invalid_values": resolved.remove_invalid_values,
        f"more than {MAX_BIASED} tokens": len(bias) > MAX_BIASED,
        "output_logits": resolved.output_logits,
        "output_scores": resolved.output_scores,
    }
    eager = tuple(name for name, on in active.items() if on)
    eager += tuple(name for name in fused_warpers(resolved).eager if name not in eager)
    if eager:
        return FusedPenalties(eager=eager)
    return FusedPenalties(
        repetition=resolved.repetition_penalty,
        frequency=resolved.frequency_penalty,
        presence=resolved.presence_penalty,
        min_new_tokens=resolved.min_new_tokens if resolved.eos_token_ids else 0,
        bias=tuple(bias.items()),
    )


def bad_words(resolved: ResolvedGeneration) -> list[tuple[int, ...]]:
    """The banned sequences: one that is just an end-of-sequence token is left out, as in Transformers."""
    return [ids for ids in resolved.bad_words_ids if not (len(ids) == 1 and ids[0] in resolved.eos_token_ids)]


def check_tokens(resolved: ResolvedGeneration, num_tokens: int) -> None:
    """Raises ValueError where an option that biases or bans names a token outside of a vocabulary of `num_tokens`."""
    named = {
        "sequence_bias": [ids for ids, _ in resolved.sequence_bias],
        "bad_words_ids": bad_words(resolved),
        "suppress_tokens": [resolved.suppress_tokens],
    }
    for name, sequences in named.items():
        check_vocabulary(name, (token for ids in sequences for token in ids), num_tokens)


def _bias(resolved: ResolvedGeneration) -> dict[int, float]:
    """What to add to each token's score, of those that are named alone."""
    bias = {int(ids[0]): value for ids, value in resolved.sequence_bias if len(ids) == 1}
    banned = [ids[0] for ids in bad_words(resolved) if len(ids) == 1]
    return bias | {int(token): -math.inf for token in (*banned, *resolved.suppress_tokens)}
