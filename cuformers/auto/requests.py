"""From resolved options to a request of the engine."""

from typing import Any

from cuformers.engine.group import Group
from cuformers.engine.request import Drafts, Request, Sampling, TokenPenalties
from cuformers.generation.fused import check_tokens, fused_penalties, fused_warpers
from cuformers.generation.resolved import ResolvedGeneration


def engine_request(
    prompt: list[int],
    resolved: ResolvedGeneration,
    seed: int,
    vocab_size: int,
    *,
    group: Group | None = None,
    assisted: bool = False,
    **more: Any,
) -> Request:
    """The request of one answer.

    Args:
        prompt: token ids.
        resolved: its options.
        seed: of its draws.
        vocab_size: tokens beyond it end nothing.
        group: its call's logits processors; where there are none, the device does what the options ask for.
        assisted: whether a small model guesses tokens.
        more: other fields of the request.

    Raises:
        ValueError: an option biases or bans a token outside the vocabulary.
    """
    warpers = fused_warpers(resolved)
    sampling = Sampling(
        temperature=warpers.temperature,
        top_k=min(warpers.top_k, vocab_size),
        top_p=warpers.top_p,
        min_p=warpers.min_p,
        seed=seed,
    )
    return Request(
        prompt=prompt,
        max_new_tokens=resolved.max_new_tokens,
        eos=tuple(token for token in resolved.eos_token_ids if token < vocab_size),
        sampling=sampling,
        penalties=_penalties(resolved, vocab_size) if group is None or group.plain else None,
        group=group,
        drafts=_drafts(resolved, assisted),
        **more,
    )


def _penalties(resolved: ResolvedGeneration, vocab_size: int) -> TokenPenalties | None:
    fused = fused_penalties(resolved)
    assert not fused.eager, f"{fused.eager} need a group"
    check_tokens(resolved, vocab_size)
    made = TokenPenalties(
        repetition=fused.repetition,
        frequency=fused.frequency,
        presence=fused.presence,
        min_new_tokens=fused.min_new_tokens,
        bias=fused.bias,
    )
    return None if made == TokenPenalties() else made


def _drafts(resolved: ResolvedGeneration, assisted: bool) -> Drafts | None:
    if assisted:
        return Drafts(count=resolved.num_assistant_tokens)
    if not resolved.prompt_lookup_num_tokens:
        return None
    return Drafts(count=resolved.prompt_lookup_num_tokens, longest=resolved.max_matching_ngram_size)
