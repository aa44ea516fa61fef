"""From resolved options to a request of the engine."""

from typing import Any

from cuformers.engine.request import Drafts, Request, Sampling
from cuformers.generation.build import fused_warpers
from cuformers.generation.resolved import ResolvedGeneration


def engine_request(
    prompt: list[int],
    resolved: ResolvedGeneration,
    seed: int,
    vocab_size: int,
    *,
    assisted: bool = False,
    **more: Any,
) -> Request:
    """The request of one answer.

    Args:
        prompt: token ids.
        resolved: its options.
        seed: of its draws.
        vocab_size: tokens beyond it end nothing.
        assisted: whether a small model guesses tokens.
        more: other fields of the request.
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
        drafts=_drafts(resolved, assisted),
        **more,
    )


def _drafts(resolved: ResolvedGeneration, assisted: bool) -> Drafts | None:
    if assisted:
        return Drafts(count=resolved.num_assistant_tokens)
    if not resolved.prompt_lookup_num_tokens:
        return None
    return Drafts(count=resolved.prompt_lookup_num_tokens, longest=resolved.max_matching_ngram_size)
