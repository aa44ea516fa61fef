"""ResolvedGeneration: every option of one request, with nothing left open."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ResolvedGeneration:
    """What a request runs with: no field is open any more. "Off" is each option's neutral value, 0, 1 or empty."""

    prompt_length: int
    """Tokens of the prompt, as `generate` counts them (a padded row has the width of the batch)."""
    max_new_tokens: int
    """Most tokens to generate, at least 1."""
    min_new_tokens: int = 0
    """Tokens before which no end-of-sequence token is allowed."""
    max_time: float | None = None
    """Seconds after which generation stops at the next token."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the generation."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence; empty: only the length does."""
    pad_token_id: int | None = None
    """Fills rows that ended early; None where neither a pad nor an end-of-sequence token is known."""
    bos_token_id: int | None = None
    """Starts an empty prompt."""
    do_sample: bool = False
    """False: greedy, and the sampling options below are neutral."""
    temperature: float = 1.0
    """Above 0."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    """1: off."""
    min_p: float = 0.0
    """0: off."""
    top_h: float | None = None
    """None: off."""
    typical_p: float = 1.0
    """1: off."""
    epsilon_cutoff: float = 0.0
    """0 (or 1): off."""
    eta_cutoff: float = 0.0
    """0 (or 1): off."""
    seed: int | tuple[int, ...] | None = None
    """As the user gave it; seeds.row_seeds makes one seed a row of it."""
    repetition_penalty: float = 1.0
    """1: off."""
    presence_penalty: float = 0.0
    """0: off."""
    frequency_penalty: float = 0.0
    """0: off."""
    no_repeat_ngram_size: int = 0
    """0: off."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be generated."""
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    """(token ids, bias) pairs."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that must not be generated."""
    begin_suppress_tokens: tuple[int, ...] = ()
    """Tokens that must not be generated first."""
    forced_bos_token_id: int | None = None
    """Forced after a prompt of one token."""
    forced_eos_token_ids: tuple[int, ...] = ()
    """One of these is forced as the last token."""
    exponential_decay_length_penalty: tuple[int, float] | None = None
    """(start, factor)."""
    renormalize_logits: bool = False
    """Scores are log-probabilities."""
    remove_invalid_values: bool = False
    """nan and infinite logits are replaced."""
    num_beams: int = 1
    """1: no beam search."""
    length_penalty: float = 1.0
    """Only for beams."""
    early_stopping: bool | str = False
    """Only for beams; True, False or "never"."""
    prompt_lookup_num_tokens: int = 0
    """0: no prompt lookup."""
    num_assistant_tokens: int = 5
    """Only with an assistant model."""
    max_matching_ngram_size: int = 3
    """Only for prompt lookup."""
    num_return_sequences: int = 1
    """Answers per prompt."""
    return_dict_in_generate: bool = False
    """Return the output object instead of the tokens."""
    output_scores: bool = False
    """Return processed logits per token; only with return_dict_in_generate."""
    output_logits: bool = False
    """Return raw logits per token; only with return_dict_in_generate."""
    output_logprobs: bool = False
    """Return the chosen tokens' log-probabilities; only with return_dict_in_generate."""
