"""From a request's resolved options to its logits processors, in Transformers' order."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from cuformers.base.log import notice
from cuformers.generation import logits_lengths as lengths
from cuformers.generation import logits_processors as history
from cuformers.generation import logits_warpers as warp
from cuformers.generation.processors import LogitsProcessor, LogitsProcessorList
from cuformers.generation.resolved import ResolvedGeneration

PrefixFunction = Callable[[int, Tensor], Sequence[int]]


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


def build_processors(
    resolved: ResolvedGeneration,
    custom: Sequence[LogitsProcessor] = (),
    *,
    prefix_allowed_tokens_fn: PrefixFunction | None = None,
    fused: bool = False,
) -> LogitsProcessorList:
    """The processors of a request, the user's own among them where Transformers 5.17 puts them.

    A custom processor takes the place of the built-in one of its type; the others come after all built-in processors
    and before the sampling filters.

    Args:
        custom: the user's processors.
        prefix_allowed_tokens_fn: (row, tokens) -> allowed token ids.
        fused: leave out the filters that `fused_warpers` gives to the sampling op.
    """
    made = [*_history(resolved), *_endings(resolved, prefix_allowed_tokens_fn), *_suppressions(resolved)]
    made = _merge(made, custom)
    if resolved.do_sample and not (fused and not fused_warpers(resolved).eager):
        made += _warpers(resolved)
    if resolved.renormalize_logits and not (fused and not resolved.output_scores):  # changes no choice
        made.append(warp.LogitNormalization())
    return LogitsProcessorList(made)


def _history(r: ResolvedGeneration) -> list[LogitsProcessor]:
    made: list[LogitsProcessor] = []
    if r.sequence_bias:
        made.append(history.SequenceBiasLogitsProcessor(dict(r.sequence_bias)))
    if r.repetition_penalty != 1.0:
        made.append(history.RepetitionPenaltyLogitsProcessor(r.repetition_penalty))
    if r.frequency_penalty != 0.0:
        made.append(history.FrequencyPenaltyLogitsProcessor(r.frequency_penalty, r.prompt_length))
    if r.presence_penalty != 0.0:
        made.append(history.PresencePenaltyLogitsProcessor(r.presence_penalty, r.prompt_length))
    if r.no_repeat_ngram_size > 0:
        made.append(history.NoRepeatNGramLogitsProcessor(r.no_repeat_ngram_size))
    if r.bad_words_ids:
        made.append(history.NoBadWordsLogitsProcessor(r.bad_words_ids, r.eos_token_ids))
    return made


def _endings(r: ResolvedGeneration, prefix: PrefixFunction | None) -> list[LogitsProcessor]:
    made: list[LogitsProcessor] = []
    if r.min_new_tokens > 0 and r.eos_token_ids:
        made.append(lengths.MinNewTokensLengthLogitsProcessor(r.prompt_length, r.min_new_tokens, r.eos_token_ids))
    if prefix is not None:
        made.append(history.PrefixConstrainedLogitsProcessor(prefix, r.num_beams))
    if r.forced_bos_token_id is not None:
        made.append(lengths.ForcedBOSTokenLogitsProcessor(r.forced_bos_token_id))
    if r.forced_eos_token_ids:
        last, new = r.prompt_length + r.max_new_tokens, r.max_new_tokens
        made.append(lengths.ForcedEOSTokenLogitsProcessor(last, r.forced_eos_token_ids, max_new_tokens=new))
    return made


def _suppressions(r: ResolvedGeneration) -> list[LogitsProcessor]:
    made: list[LogitsProcessor] = []
    if r.remove_invalid_values:
        made.append(history.InfNanRemoveLogitsProcessor())
    if r.exponential_decay_length_penalty is not None:
        decay = r.exponential_decay_length_penalty
        made.append(lengths.ExponentialDecayLengthPenalty(decay, r.eos_token_ids, r.prompt_length))
    if r.suppress_tokens:
        made.append(history.SuppressTokensLogitsProcessor(r.suppress_tokens))
    if r.begin_suppress_tokens:
        # A forced first token is not the first that can be chosen.
        begin = r.prompt_length + int(r.prompt_length <= 1 and r.forced_bos_token_id is not None)
        made.append(lengths.SuppressTokensAtBeginLogitsProcessor(r.begin_suppress_tokens, begin))
    return made


def _warpers(r: ResolvedGeneration) -> list[LogitsProcessor]:
    made: list[LogitsProcessor] = []
    if r.temperature != 1.0:
        made.append(warp.TemperatureLogitsWarper(r.temperature))
    if r.top_h is not None:
        made.append(warp.TopHLogitsWarper(r.top_h))
    if r.top_k > 0:
        made.append(warp.TopKLogitsWarper(r.top_k))
    if r.top_p < 1:
        made.append(warp.TopPLogitsWarper(r.top_p))
    if r.min_p > 0:
        made.append(warp.MinPLogitsWarper(r.min_p))
    if r.typical_p < 1:
        made.append(warp.TypicalLogitsWarper(r.typical_p))
    if 0 < r.epsilon_cutoff < 1:
        made.append(warp.EpsilonLogitsWarper(r.epsilon_cutoff))
    if 0 < r.eta_cutoff < 1:
        made.append(warp.EtaLogitsWarper(r.eta_cutoff))
    return made


def _merge(made: list[LogitsProcessor], custom: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    taken = []
    for built_in in made:
        own = next((c for c in custom if type(c) is type(built_in)), None)
        if own is not None:
            notice(f"your {type(own).__name__} takes the place of the one that the options ask for.", once=True)
        taken.append(built_in if own is None else own)
    return taken + [c for c in custom if not any(c is t for t in taken)]
