"""Scores in two stages: all of the vocabulary is copied once, then only tokens of the history are visited.

The first stage copies the logits, adds biases, bans, and counts each row's tokens in the workspace. The second goes
through the history again and takes each count out of the workspace, which leaves a zero: whoever finds a count, and
only the first to come does, is in charge of that token.
"""

import triton
import triton.language as tl

PROMPT = tl.constexpr(1 << 30)
"""Marks a count whose token is in the prompt."""


@triton.jit
def _begin(repetition, frequency, presence, prompt, length):
    """The first place of the history that matters; the end where none does."""
    answer = (frequency != 0.0) | (presence != 0.0)
    return tl.where(repetition != 1.0, 0, tl.where(answer, prompt, length))


@triton.jit
def _within(ids, low, high):
    return (ids >= low) & (ids < high)


@triton.jit
def _add_bias(logits_ptr, scores_ptr, ids_ptr, bias_ptr, count, low, high, BLOCK: tl.constexpr):
    """Of a row's `count` biases, those for tokens from low to high."""
    index = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + index, mask=index < count, other=-1)
    here = _within(ids, low, high)
    x = tl.load(logits_ptr + ids, mask=here, other=0.0).to(tl.float32)
    tl.store(scores_ptr + ids, x + tl.load(bias_ptr + index, mask=here, other=0.0), mask=here)


@triton.jit
def _ban(scores_ptr, ids_ptr, count, low, high, BLOCK: tl.constexpr):
    """Of `count` tokens, those from low to high."""
    index = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + index, mask=index < count, other=-1)
    tl.store(scores_ptr + ids, tl.full((BLOCK,), -float("inf"), tl.float32), mask=_within(ids, low, high))


@triton.jit(do_not_specialize=["num_eos", "num_bias"])
def score_kernel(
    logits_ptr, rows_ptr, lengths_ptr, history_ptr,
    prompts_ptr, repetition_ptr, frequency_ptr, presence_ptr, least_ptr, eos_ptr, bias_ids_ptr, bias_ptr,
    counts_ptr, scores_ptr, V, history_stride, num_eos, num_bias,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, EOS_BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [R, splits]: the scores of BLOCK tokens but for the penalties, and the counts of a share of the history."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += place * V
    scores_ptr += place * V
    low = split * BLOCK
    high = tl.minimum(low + BLOCK, V)
    copied = low + tl.arange(0, BLOCK)
    tl.store(scores_ptr + copied, tl.load(logits_ptr + copied, mask=copied < V).to(tl.float32), mask=copied < V)
    row = tl.load(rows_ptr + place).to(tl.int64)
    if row < 0:
        return
    counts_ptr += row * V
    tl.debug_barrier()  # stores from here on come after those of the copy
    biases = row * num_bias
    first = tl.load(bias_ids_ptr + biases, mask=num_bias > 0, other=-1)
    biased = tl.where(first < 0, 0, num_bias)  # most rows have none: the width is that of the largest request
    _add_bias(logits_ptr, scores_ptr, bias_ids_ptr + biases, bias_ptr + biases, biased, low, high, BIAS_BLOCK)
    length, prompt = tl.load(lengths_ptr + place), tl.load(prompts_ptr + row)
    if length - prompt < tl.load(least_ptr + row):
        tl.debug_barrier()  # and these after those of the bias
        _ban(scores_ptr, eos_ptr + row * num_eos, num_eos, low, high, EOS_BLOCK)
    repetition, frequency = tl.load(repetition_ptr + row), tl.load(frequency_ptr + row)
    begin = _begin(repetition, frequency, tl.load(presence_ptr + row), prompt, length)
    for start in range(begin + split * SPAN, length, tl.num_programs(1) * SPAN):
        at = start + tl.arange(0, SPAN)
        token = tl.load(history_ptr + row * history_stride + at, mask=at < length, other=-1)
        there = _within(token, 0, V)
        tl.atomic_or(counts_ptr + token, PROMPT, mask=there & (at < prompt), sem="relaxed")
        tl.atomic_add(counts_ptr + token, 1, mask=there & (at >= prompt), sem="relaxed")


@triton.jit
def penalty_kernel(
    rows_ptr, lengths_ptr, history_ptr, prompts_ptr, repetition_ptr, frequency_ptr, presence_ptr,
    counts_ptr, scores_ptr, V, history_stride, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [R, shares]: the penalties of the tokens in a share of the history. Compile without fused multiply-add."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0).to(tl.int64)
    scores_ptr += place * V
    row = tl.load(rows_ptr + place).to(tl.int64)
    if row < 0:
        return
    counts_ptr += row * V
    length, prompt = tl.load(lengths_ptr + place), tl.load(prompts_ptr + row)
    repetition, frequency = tl.load(repetition_ptr + row), tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    begin = _begin(repetition, frequency, presence, prompt, length)
    for start in range(begin + tl.program_id(1) * SPAN, length, tl.num_programs(1) * SPAN):
        at = start + tl.arange(0, SPAN)
        token = tl.load(history_ptr + row * history_stride + at, mask=at < length, other=-1)
        there = _within(token, 0, V)
        count = tl.atomic_xchg(counts_ptr + token, tl.zeros((SPAN,), tl.int32), mask=there, sem="relaxed")
        mine = there & (count != 0)
        generated = count & (PROMPT - 1)
        x = tl.load(scores_ptr + token, mask=mine, other=0.0)
        x = tl.where(x < 0.0, x * repetition, tl.div_rn(x, repetition))
        x = x - frequency * generated.to(tl.float32)
        tl.store(scores_ptr + token, tl.where(generated > 0, x - presence, x), mask=mine)
