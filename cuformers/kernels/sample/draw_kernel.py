"""The argmax over a vocabulary, of logits or of logits with Gumbel noise, in two stages."""

import triton
import triton.language as tl

from cuformers.kernels.sample.keys_kernel import inverse, raw


@triton.jit
def _gumbel(token, seed, position):
    """The same numbers as `philox.gumbel`."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, token, low, high, tl.zeros_like(low))
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    return -tl.log(tl.where(v < 0.01, series, -tl.log(1.0 - v)))


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, thresholds_ptr, seeds_ptr, positions_ptr, values_ptr, tokens_ptr, V,
    BLOCK: tl.constexpr, GREEDY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [B, splits]: the best score of BLOCK tokens in a row, and its token (the first on ties)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row * V
    if GREEDY:
        score = raw(logits_ptr, token, V)
    else:
        temperature = tl.load(temperature_ptr + row)
        score = raw(logits_ptr, token, V) * inverse(temperature)
        if temperature > 0.0:
            kept = score >= tl.load(thresholds_ptr + row)
            # Noise is the costly part, and most blocks of a filtered row keep nothing.
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                noisy = score + _gumbel(token, tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
                score = tl.where(kept, noisy, -float("inf"))
            else:
                score = tl.full((BLOCK,), -float("inf"), tl.float32)
    best, where = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    at = row * tl.num_programs(1) + split
    tl.store(values_ptr + at, best)
    tl.store(tokens_ptr + at, split * BLOCK + where)


@triton.jit(do_not_specialize=["splits"])
def pick_kernel(values_ptr, tokens_ptr, out_ptr, splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid [B]: the best of the splits' bests, the first on ties."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    values = tl.load(values_ptr + row * splits + split, mask=split < splits, other=-float("inf"))
    _, where = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, tl.load(tokens_ptr + row * splits + where).to(tl.int64))
