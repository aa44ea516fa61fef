"""From a request's resolved options to its logits processors, in Transformers' order."""

from collections.abc import Callable, Sequence

from torch import Tensor

from cuformers.base.log import notice
from cuformers.generation import logits_lengths as lengths
from cuformers.generation import logits_processors as history
from cuformers.generation import logits_warpers as warp
from cuformers.generation.fused import fused_penalties, fused_warpers
from cuformers.generation.processors import LogitsProcessor, LogitsProcessorList
from cuformers.generation.resolved import ResolvedGeneration

PrefixFunction = Callable[[int, Tensor], Sequence[int]]


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
        fused: leave out what `fused_penalties`, where nothing else has to run, and `fused_warpers` give to ops.
    """
    made: list[LogitsProcessor] = []
    if not fused or custom or prefix_allowed_tokens_fn is not None or fused_penalties(resolved).eager:
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
