"""From a row's filters to the least logit they keep, without sorting a vocabulary.

First, each of a row's splits finds its own largest logits (fewer than CANDIDATES, by bisection on the bits) and its
part of the softmax's sum. Then one program per row bisects among all candidates. The answer is exact when it is not
below any split's cut, which is the case unless very many tokens are kept; then the same search runs over the row.
"""

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """Float32 -> int32 in the same order; its own inverse on the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def inverse(temperature):
    """What scales a row's logits: 1 / temperature, correctly rounded as in torch; 1 for a greedy row."""
    return tl.where(temperature > 0.0, tl.div_rn(1.0, tl.maximum(temperature, 1e-6)), 1.0)


@triton.jit
def scaled(ptr, index, V, factor):
    """logits * factor; -inf for NaN and past the end."""
    x = tl.load(ptr + index, mask=index < V, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x * factor, -float("inf"))


@triton.jit
def _middle(low, high):
    """Floor of the mean without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def split_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    candidates_ptr, counts_ptr, cuts_ptr, peaks_ptr, sums_ptr, V,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, STRIPE: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [B, SPLITS]. A split is every SPLITS-th stripe of STRIPE tokens, as likely tokens are often neighbours."""
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
    z = scaled(logits_ptr + row.to(tl.int64) * V, index, V, inverse(temperature))
    at = row * SPLITS + split
    peak = tl.max(z, axis=0)
    tl.store(peaks_ptr + at, peak)
    if searched:
        safe = tl.where(peak == -float("inf"), 0.0, peak)
        tl.store(sums_ptr + at, tl.sum(tl.exp(z - safe), axis=0))
        key = key_of(z)
        # Fewer than CANDIDATES keys are >= high, at least as many are >= low.
        low = key_of(tl.full((), -float("inf"), tl.float32))
        high = key_of(peak) + 1
        while low + 1 < high:
            mid = _middle(low, high)
            enough = tl.sum((key >= mid).to(tl.int32), axis=0) >= CANDIDATES
            low = tl.where(enough, mid, low)
            high = tl.where(enough, high, mid)
        kept = key >= high
        slot = tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(candidates_ptr + at.to(tl.int64) * CANDIDATES + slot, z, mask=kept)
        tl.store(counts_ptr + at, tl.sum(kept.to(tl.int32), axis=0))
        tl.store(cuts_ptr + at, high)


@triton.jit
def _count_and_mass(
    mid, tile, logits_ptr, V, factor, peak, floor, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(tokens with key >= mid, softmax mass relative to the peak of those with key > mid and key >= floor)."""
    if WHOLE:
        count = tl.zeros((BLOCK,), dtype=tl.int32)
        mass = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in tl.range(0, V, BLOCK):
            z = scaled(logits_ptr, start + tl.arange(0, BLOCK), V, factor)
            key = key_of(z)
            count += (key >= mid).to(tl.int32)
            mass += tl.where((key > mid) & (key >= floor), tl.exp(z - peak), 0.0)
    else:
        key = key_of(tile)
        count = (key >= mid).to(tl.int32)
        mass = tl.where((key > mid) & (key >= floor), tl.exp(tile - peak), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _search(
    tile, logits_ptr, V, factor, peak, total, top_k, top_p, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(least key kept by top_k, by both). `total`: softmax mass of the whole row relative to its peak."""
    bottom = key_of(tl.full((), -float("inf"), tl.float32))
    top = key_of(peak)
    floor = bottom
    if top_k > 0:
        high = top + 1
        while floor + 1 < high:
            mid = _middle(floor, high)
            count, _ = _count_and_mass(mid, tile, logits_ptr, V, factor, peak, bottom, WHOLE, BLOCK)
            floor = tl.where(count >= top_k, mid, floor)
            high = tl.where(count >= top_k, high, mid)
        _, total = _count_and_mass(floor - 1, tile, logits_ptr, V, factor, peak, floor, WHOLE, BLOCK)
    least = floor
    if top_p < 1.0:
        goal = tl.maximum(top_p * total, 1e-38)
        low = floor - 1
        least = top
        while low + 1 < least:
            mid = _middle(low, least)
            _, above = _count_and_mass(mid, tile, logits_ptr, V, factor, peak, floor, WHOLE, BLOCK)
            least = tl.where(above < goal, mid, least)
            low = tl.where(above < goal, low, mid)
    return floor, least


@triton.jit
def row_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    candidates_ptr, counts_ptr, cuts_ptr, peaks_ptr, sums_ptr, thresholds_ptr, V,
    SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [B]: stores each row's least kept logit; -inf where nothing is filtered."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    searched = (top_k > 0) | (top_p < 1.0)
    threshold = tl.full((), -float("inf"), tl.float32)
    if (temperature > 0.0) & (searched | (min_p > 0.0)):
        split = tl.arange(0, SPLITS_BLOCK)
        there = split < SPLITS
        at = row * SPLITS + split
        peaks = tl.load(peaks_ptr + at, mask=there, other=-float("inf"))
        peak = tl.max(peaks, axis=0)
        if searched & (peak > -float("inf")):
            sums = tl.load(sums_ptr + at, mask=there, other=0.0)
            total = tl.sum(tl.exp(peaks - peak) * sums, axis=0)
            i = tl.arange(0, SPLITS_BLOCK * CANDIDATES)
            counts = tl.load(counts_ptr + row * SPLITS + i // CANDIDATES, mask=i < SPLITS * CANDIDATES, other=0)
            base = candidates_ptr + (row * SPLITS).to(tl.int64) * CANDIDATES
            tile = tl.load(base + i, mask=i % CANDIDATES < counts, other=-float("inf"))
            logits_ptr += row.to(tl.int64) * V
            factor = inverse(temperature)
            floor, least = _search(tile, logits_ptr, V, factor, peak, total, top_k, top_p, False, BLOCK)
            cut = tl.max(tl.load(cuts_ptr + at, mask=there, other=-2147483648), axis=0)
            if (least < cut) | ((top_k > 0) & (floor < cut)):
                floor, least = _search(tile, logits_ptr, V, factor, peak, total, top_k, top_p, True, BLOCK)
            threshold = float_of(least)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, peak + tl.log(min_p))
    tl.store(thresholds_ptr + row, threshold)
