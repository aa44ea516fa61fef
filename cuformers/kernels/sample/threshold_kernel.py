"""From a row's filters to the least logit they keep, without sorting a vocabulary.

First, each of a row's splits finds its own largest logits (fewer than CANDIDATES, by bisection on their keys) and its
part of the softmax's sum. Then one program per row bisects among all candidates. The answer is exact when it is not
below any split's cut, which is the case unless very many tokens are kept; such flat rows are left to `flat_kernel`.
"""

import triton
import triton.language as tl

from cuformers.kernels.sample.keys_kernel import NEGATIVE_INFINITY, bottom, float_of, inverse, key_of, middle, raw

LARGEST = tl.constexpr(2147483647)
SPAN = tl.constexpr(36.0)
"""A token so far below the peak (in scaled logits) has no say in top_p: a vocabulary of them weighs less than the
distance of any float32 from 1."""


@triton.jit
def split_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    candidates_ptr, counts_ptr, cuts_ptr, tops_ptr, lows_ptr, sums_ptr, V,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, STRIPE: tl.constexpr, CANDIDATES: tl.constexpr, SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [B, SPLITS]. A split is every SPLITS-th stripe of STRIPE tokens, as likely tokens are often neighbours.

    Stores its largest and least finite logit, and its softmax sum relative to the largest.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, split = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    searched = (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1.0)
    if (temperature <= 0.0) | ((not searched) & (tl.load(min_p_ptr + row) <= 0.0)):
        return
    i = tl.arange(0, BLOCK)
    index = (i // STRIPE * SPLITS + split) * STRIPE + i % STRIPE
    x = raw(logits_ptr + row.to(tl.int64) * V, index, V)
    at = row * SPLITS + split
    top = tl.max(x, axis=0)
    tl.store(tops_ptr + at, top)
    if searched:
        factor = inverse(temperature)
        safe = tl.where(top == NEGATIVE_INFINITY, 0.0, top * factor)
        tl.store(lows_ptr + at, tl.min(tl.where(x == NEGATIVE_INFINITY, float("inf"), x), axis=0))
        tl.store(sums_ptr + at, tl.sum(tl.exp(x * factor - safe), axis=0))
        key = key_of(x, SHIFT)
        # Fewer than CANDIDATES keys are >= high, namely `kept`. Any such cut will do that keeps half the slots full.
        low = bottom(SHIFT)
        high = key_of(top, SHIFT) + 1
        kept = tl.full((), 0, tl.int32)
        while (low + 1 < high) & (kept < CANDIDATES // 2):
            mid = middle(low, high)
            count = tl.sum((key >= mid).to(tl.int32), axis=0)
            low = tl.where(count >= CANDIDATES, mid, low)
            high = tl.where(count >= CANDIDATES, high, mid)
            kept = tl.where(count >= CANDIDATES, kept, count)
        chosen = key >= high
        slot = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(candidates_ptr + at.to(tl.int64) * CANDIDATES + slot, x, mask=chosen)
        tl.store(counts_ptr + at, tl.sum(chosen.to(tl.int32), axis=0))
        tl.store(cuts_ptr + at, high)


@triton.jit
def _search(x, factor, peak, total, top_k, top_p, SHIFT: tl.constexpr):
    """(least key kept by top_k, by both) among candidates x. `total`: the whole row's mass relative to its peak."""
    key = key_of(x, SHIFT)
    mass = tl.exp(x * factor - peak)
    floor = bottom(SHIFT)
    top = tl.max(key, axis=0)
    if top_k > 0:
        high = top + 1
        while floor + 1 < high:
            mid = middle(floor, high)
            count = tl.sum((key >= mid).to(tl.int32), axis=0)
            floor = tl.where(count >= top_k, mid, floor)
            # Just as many as wanted: the search is over.
            high = tl.where(count > top_k, high, tl.where(count == top_k, mid + 1, mid))
        floor = tl.min(tl.where(key >= floor, key, LARGEST), axis=0)
        total = tl.sum(tl.where(key >= floor, mass, 0.0), axis=0)
    least = floor
    if top_p < 1.0:
        goal = tl.maximum(top_p * total, 1e-38)
        low = floor - 1
        least = top
        while low + 1 < least:
            mid = middle(low, least)
            above = tl.sum(tl.where(key > mid, mass, 0.0), axis=0)
            least = tl.where(above < goal, mid, least)
            low = tl.where(above < goal, low, mid)
    return floor, least


@triton.jit
def row_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    candidates_ptr, counts_ptr, cuts_ptr, tops_ptr, lows_ptr, sums_ptr,
    thresholds_ptr, flat_ptr, scales_ptr, bin_counts_ptr, bin_masses_ptr, V,
    SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, BINS: tl.constexpr,
    SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [B]: stores each row's least kept scaled logit; -inf where nothing is filtered.

    flat [B, 3] int32: 1 where the row is left to `flat_kernel`, whose counters and bins are then zeroed, and whose
    scale [B, 2] (largest logit, bins per logit) is stored; the threshold is min_p's then.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    searched = (top_k > 0) | (top_p < 1.0)
    top_k = tl.where(top_k < V, top_k, 0)
    threshold = tl.full((), NEGATIVE_INFINITY, tl.float32)
    flat = tl.full((), 0, tl.int32)
    if (temperature > 0.0) & (searched | (min_p > 0.0)):
        split = tl.arange(0, SPLITS_BLOCK)
        there = split < SPLITS
        at = row * SPLITS + split
        factor = inverse(temperature)
        tops = tl.load(tops_ptr + at, mask=there, other=NEGATIVE_INFINITY)
        top = tl.max(tops, axis=0)
        peak = tl.max(tops * factor, axis=0)
        if ((top_k > 0) | (top_p < 1.0)) & (top > NEGATIVE_INFINITY):
            sums = tl.load(sums_ptr + at, mask=there, other=0.0)
            total = tl.sum(tl.exp(tops * factor - peak) * sums, axis=0)
            i = tl.arange(0, SPLITS_BLOCK * CANDIDATES)
            counts = tl.load(counts_ptr + row * SPLITS + i // CANDIDATES, mask=i < SPLITS * CANDIDATES, other=0)
            base = candidates_ptr + (row * SPLITS).to(tl.int64) * CANDIDATES
            x = tl.load(base + i, mask=i % CANDIDATES < counts, other=NEGATIVE_INFINITY)
            floor, least = _search(x, factor, peak, total, top_k, top_p, SHIFT)
            cut = tl.max(tl.load(cuts_ptr + at, mask=there, other=-LARGEST), axis=0)
            if (least < cut) | ((top_k > 0) & (floor < cut)):
                flat += 1
                low = tl.min(tl.load(lows_ptr + at, mask=there, other=float("inf")), axis=0)
                span = tl.minimum(top - low, tl.full((), SPAN, tl.float32) / factor)
                tl.store(scales_ptr + row * 2, top)
                tl.store(scales_ptr + row * 2 + 1, tl.where(span > 0.0, tl.full((), BINS - 1, tl.float32) / span, 0.0))
                bins = row.to(tl.int64) * BINS + tl.arange(0, BINS)
                tl.store(bin_counts_ptr + bins, tl.zeros((BINS,), tl.int32))
                tl.store(bin_masses_ptr + bins, tl.zeros((BINS,), tl.int64))
                tl.store(flat_ptr + row * 3 + 1, 0)
                tl.store(flat_ptr + row * 3 + 2, 0)
            else:
                threshold = float_of(least, SHIFT) * factor
        if min_p > 0.0:
            threshold = tl.maximum(threshold, peak + tl.log(min_p))
    tl.store(thresholds_ptr + row, threshold)
    tl.store(flat_ptr + row * 3, flat)
