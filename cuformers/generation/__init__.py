"""What to generate and when to stop: options, logits processors, stopping criteria. No engine."""

from importlib import import_module
from typing import Any

_PLACES = {
    "batching_config": "ContinuousBatchingConfig",
    "build": "build_processors",
    "config": "GenerationConfig",
    "fused": "FusedPenalties FusedWarpers fused_penalties fused_warpers",
    "logits_lengths": "ExponentialDecayLengthPenalty ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor "
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor SuppressTokensAtBeginLogitsProcessor",
    "logits_processors": "FrequencyPenaltyLogitsProcessor InfNanRemoveLogitsProcessor NoBadWordsLogitsProcessor "
    "NoRepeatNGramLogitsProcessor PrefixConstrainedLogitsProcessor PresencePenaltyLogitsProcessor "
    "RepetitionPenaltyLogitsProcessor SequenceBiasLogitsProcessor SuppressTokensLogitsProcessor",
    "logits_warpers": "EpsilonLogitsWarper EtaLogitsWarper LogitNormalization MinPLogitsWarper "
    "TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper TypicalLogitsWarper",
    "output": "GenerateBeamDecoderOnlyOutput GenerateDecoderOnlyOutput ModelOutput",
    "processors": "LogitsProcessor LogitsProcessorList RowProcessor",
    "resolving": "resolve",
    "resolved": "ResolvedGeneration",
    "rows": "Rows",
    "seeds": "row_seed row_seeds",
    "stop_strings": "StopStrings",
    "stopping": "EosTokenCriteria MaxLengthCriteria MaxTimeCriteria StoppingCriteria StoppingCriteriaList "
    "StopStringCriteria",
}
_PLACE_OF = {name: module for module, names in _PLACES.items() for name in names.split()}

__all__ = sorted(_PLACE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACE_OF[name]}"), name)
