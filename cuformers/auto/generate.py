"""`model.generate`: Transformers' call, run by the engine."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cuformers.auto.beams import BeamSearch
from cuformers.auto.prompts import Prompts, check_prompts, read_prompts
from cuformers.auto.requests import engine_request
from cuformers.auto.streamers import BaseStreamer
from cuformers.base.errors import bad_argument
from cuformers.engine.group import Group, Trace
from cuformers.engine.request import Request
from cuformers.generation.build import PrefixFunction, build_processors
from cuformers.generation.config import GenerationConfig
from cuformers.generation.output import GenerateDecoderOnlyOutput, GenerateOutput
from cuformers.generation.processors import LogitsProcessor
from cuformers.generation.resolved import ResolvedGeneration
from cuformers.generation.resolving import resolve
from cuformers.generation.seeds import row_seeds
from cuformers.generation.stopping import MaxTimeCriteria, StoppingCriteria, StopStringCriteria

if TYPE_CHECKING:
    from cuformers.auto.model import PreTrainedModel


def generate(
    model: "PreTrainedModel",
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Sequence[LogitsProcessor] | None = None,
    stopping_criteria: Sequence[StoppingCriteria] | None = None,
    prefix_allowed_tokens_fn: PrefixFunction | None = None,
    streamer: BaseStreamer | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
    assistant_model: "PreTrainedModel | None" = None,
    kv_cache_dtype: str = "auto",
    **options: Any,
) -> Tensor | GenerateOutput:
    """Continues prompts.

    Args:
        inputs: token ids [B, S], padded on either side; `input_ids` is the same by name. None starts from the
            beginning-of-text token.
        generation_config: options; those given by name here count more, the checkpoint's own less.
        logits_processor: change the scores before a token is chosen, after the built-in ones.
        stopping_criteria: may end a row; they run on the host.
        prefix_allowed_tokens_fn: (row, tokens) -> token ids allowed next.
        streamer: is given the prompt and each new token; for one row.
        attention_mask: [B, S], 1 for real tokens.
        tokenizer: needed by stop_strings.
        assistant_model: a small model with the same tokens. It guesses `num_assistant_tokens` tokens in each step for
            this one to check: the same answer, sooner where it guesses well.
        kv_cache_dtype: what keys and values are kept in: "auto", the model's dtype, or "fp8_e4m3" ("fp8"), half the
            bytes. The fp8 cache's buffers are kept beside those of other calls.
        options: any field of GenerationConfig, such as max_new_tokens, do_sample, temperature, seed.

    Returns:
        [B * num_return_sequences, S + new tokens], int64, each row the input and its continuation, rows that ended
        early filled with the pad token, a prompt's answers one after the other, of beam search the best first; with
        return_dict_in_generate=True an object that holds this as `sequences`.

    Raises:
        ValueError: an option that is unknown, impossible or not supported; a prompt that can't be used.
    """
    if inputs is not None and input_ids is not None:
        raise ValueError("inputs and input_ids name the same thing: give one of them.")
    given = inputs if inputs is not None else input_ids
    check_prompts(given, attention_mask)
    rows, width = (1, 1) if given is None else given.shape
    config = model.config
    resolved = resolve(
        generation_config,
        model.generation_config,
        options,
        width,
        max_positions=config.max_position_embeddings,
        batch_size=rows,
        has_mask=attention_mask is not None,
    )
    prompts = read_prompts(given, attention_mask, resolved, config.vocab_size)
    if streamer is not None:
        _check_streamed(len(prompts.rows), resolved)
    processors = build_processors(
        resolved,
        logits_processor or (),
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        fused=resolved.num_beams == 1,
    )
    _check_assisted(assistant_model, resolved)
    criteria = _criteria(resolved, stopping_criteria or (), tokenizer)
    if resolved.num_beams > 1:
        return BeamSearch(model.engine_with(None, kv_cache_dtype), prompts, resolved, processors, criteria).run()
    engine = model.engine_with(assistant_model, kv_cache_dtype)
    group = Group(
        processors=processors,
        pad=resolved.pad_token_id or 0,
        width=prompts.width,
        keep_logits=resolved.output_logits,
        keep_scores=resolved.output_scores,
    )
    hook = _hook(prompts, group, criteria, streamer)
    logprobs = 0 if resolved.output_logprobs else None  # of the chosen tokens alone
    more = {"group": group, "on_token": hook, "assisted": assistant_model is not None, "logprobs": logprobs}
    requests = _requests(prompts, resolved, config.vocab_size, more)
    group.batch.extend(requests)
    try:
        if streamer is not None:
            streamer.put(prompts.padded.cpu())
        engine.run(requests)
    finally:
        if streamer is not None:
            streamer.end()  # also after an error: somebody may be waiting for more
    return _output(prompts, requests, group, resolved)


def _check_streamed(rows: int, resolved: ResolvedGeneration) -> None:
    if resolved.num_beams > 1:
        raise ValueError("streamer can't follow beam search, whose tokens are known at its end only: set num_beams=1.")
    if rows * resolved.num_return_sequences != 1:
        raise ValueError("streamer takes one row: generate the prompts one by one, with num_return_sequences=1.")


def _check_assisted(assistant: "PreTrainedModel | None", resolved: ResolvedGeneration) -> None:
    for name, unset in (("prompt_lookup_num_tokens", 0), ("num_beams", 1)):
        if assistant is not None and getattr(resolved, name) > unset:
            raise bad_argument(name, getattr(resolved, name), "its default with an assistant_model", "Leave out one.")


def _criteria(
    resolved: ResolvedGeneration, custom: Sequence[StoppingCriteria], tokenizer: Any
) -> list[StoppingCriteria]:
    criteria = list(custom)
    if resolved.stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer: pass tokenizer=tokenizer to generate.")
        criteria.append(StopStringCriteria(tokenizer, resolved.stop_strings))
    if resolved.max_time is not None:
        criteria.append(MaxTimeCriteria(resolved.max_time))
    return criteria


def _hook(
    prompts: Prompts, group: Group, criteria: list[StoppingCriteria], streamer: BaseStreamer | None
) -> Callable[[Request, int], bool] | None:
    """What happens on the host with each new token; None where nothing has to."""
    if not criteria and streamer is None:
        return None

    def on_token(request: Request, token: int) -> bool:
        if streamer is not None:
            streamer.put(torch.tensor([token]))
        if not criteria:
            return False
        padding = [group.pad] * (prompts.width - len(request.prompt))
        ids = torch.tensor([padding + request.context])
        kept = group.traces.get(request, Trace()).scores[: len(request.generated)]
        scores = tuple(row[None] for row in kept) if group.keep_scores else None
        return any(bool(torch.as_tensor(criterion(ids, scores)).all()) for criterion in criteria)

    return on_token


def _requests(
    prompts: Prompts, resolved: ResolvedGeneration, vocab_size: int, more: dict[str, Any]
) -> list[Request]:
    rows = [row for row in prompts.rows for _ in range(resolved.num_return_sequences)]
    seeds = row_seeds(resolved.seed, len(rows)) if resolved.do_sample else [0] * len(rows)
    return [engine_request(row, resolved, seed, vocab_size, **more) for row, seed in zip(rows, seeds)]


def _output(
    prompts: Prompts, requests: list[Request], group: Group, resolved: ResolvedGeneration
) -> Tensor | GenerateDecoderOnlyOutput:
    steps = max(len(r.generated) for r in requests)
    pad = resolved.pad_token_id or 0
    new = torch.tensor([r.generated + [pad] * (steps - len(r.generated)) for r in requests])
    padded = prompts.padded.repeat_interleave(resolved.num_return_sequences, dim=0)
    sequences = torch.cat((padded, new.to(padded.device)), dim=1)
    if not resolved.return_dict_in_generate:
        return sequences
    traces = [group.traces.get(r, Trace()) for r in requests]
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_stacked([t.scores for t in traces], steps) if group.keep_scores else None,
        logits=_stacked([t.logits for t in traces], steps) if group.keep_logits else None,
        logprobs=_logprobs(requests, steps).to(padded.device) if resolved.output_logprobs else None,
    )


def _stacked(rows: list[list[Tensor]], steps: int) -> tuple[Tensor, ...]:
    """One [N, V] for each step; zeros where a row has ended."""
    empty = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[i] if i < len(row) else empty for row in rows]) for i in range(steps))


def _logprobs(requests: list[Request], steps: int) -> Tensor:
    """[N, S], float32: log-probability of each generated token; 0 after a row's end."""
    return torch.tensor([r.token_logprobs + [0.0] * (steps - len(r.token_logprobs)) for r in requests])
