"""Thresholds of flat rows, which keep very many tokens: a histogram of the row, then a search in the bins that matter.

The bins are equal steps down from the largest logit. Counts and softmax masses are added up as integers, so that the
order in which programs arrive changes nothing. The tokens of the decisive bins (one for top_k, one or a few for
top_p) are gathered, and the last program to arrive bisects among them. Only where more than ROOM tokens share them,
in rows of very many equal logits, does that program go through the whole row instead.
"""

import triton
import triton.language as tl

from cuformers.kernels.sample.keys_kernel import NEGATIVE_INFINITY, bottom, float_of, inverse, key_of, middle, raw

UNIT = tl.constexpr(4398046511104.0)
"""2**42: the largest logit's mass. A million tokens' fit int64."""


@triton.jit
def _bin(x, top, step, BINS: tl.constexpr):
    """Of logits; anything for -inf. Subtract, then multiply: nothing that a compiler could fuse and so round anew."""
    return tl.minimum((top - x) * step, BINS - 1.0).to(tl.int32)


@triton.jit
def _mass(x, top, factor):
    """Softmax masses relative to the largest logit's, in UNITs: int64."""
    return (tl.exp(x * factor - top * factor) * UNIT).to(tl.int64)


@triton.jit
def histogram_kernel(
    logits_ptr, temperature_ptr, flat_ptr, scales_ptr, bin_counts_ptr, bin_masses_ptr, V,
    BINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [B, parts]: adds BLOCK tokens of a flat row to its bins."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(flat_ptr + row * 3) == 0:
        return
    top, step = tl.load(scales_ptr + row * 2), tl.load(scales_ptr + row * 2 + 1)
    factor = inverse(tl.load(temperature_ptr + row))
    x = raw(logits_ptr + row * V, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), V)
    finite = x > NEGATIVE_INFINITY
    at = row * BINS + tl.where(finite, _bin(x, top, step, BINS), 0)
    tl.atomic_add(bin_counts_ptr + at, tl.full((BLOCK,), 1, tl.int32), mask=finite, sem="relaxed")
    tl.atomic_add(bin_masses_ptr + at, _mass(x, top, factor), mask=finite, sem="relaxed")


@triton.jit
def _bins_of_interest(counts, masses, top_k, top_p, BINS: tl.constexpr):
    """Where the answers lie: (bin of the k-th token, tokens above that bin, mass above it, the first and the last bin
    that may hold the least token of top_p, mass above the first). BINS and -1 stand for no bin."""
    index = tl.arange(0, BINS)
    k_bin = tl.full((), BINS, tl.int32)
    if top_k > 0:
        k_bin = tl.sum((tl.cumsum(counts, axis=0) < top_k).to(tl.int32), axis=0)
    above = index < k_bin
    k_count = tl.sum(tl.where(above, counts, 0), axis=0)
    k_mass = tl.sum(tl.where(above, masses, 0), axis=0)
    first = tl.full((), BINS, tl.int32)
    last = tl.full((), -1, tl.int32)
    if top_p < 1.0:
        # How much of the k-th token's bin is kept is not known yet: the goal lies between two.
        most = k_mass + tl.sum(tl.where(index == k_bin, masses, 0), axis=0)
        running = tl.cumsum(masses, axis=0).to(tl.float64)
        first = tl.sum((running < _goal(top_p, k_mass)).to(tl.int32), axis=0)
        last = tl.minimum(tl.sum((running < _goal(top_p, most)).to(tl.int32), axis=0), BINS - 1)
        first = tl.minimum(first, last)
    p_mass = tl.sum(tl.where(index < first, masses, 0), axis=0)
    return k_bin, k_count, k_mass, first, last, p_mass


@triton.jit
def _goal(top_p, total):
    """A token stays when less than this mass lies above it: float64."""
    return tl.maximum(top_p.to(tl.float64) * total.to(tl.float64), 1.0)


@triton.jit
def _within(x, top, step, first, last, BINS: tl.constexpr):
    """Which logits are in the bins first to last."""
    where = _bin(x, top, step, BINS)
    return (x > NEGATIVE_INFINITY) & (where >= first) & (where <= last)


@triton.jit
def _extent(
    x, logits_ptr, V, top, step, first, last, WHOLE: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Least and greatest key in the bins first to last, of x, or where WHOLE of the row."""
    low = tl.full(x.shape, 2147483647, tl.int32)
    high = tl.full(x.shape, -2147483648, tl.int32)
    if WHOLE:
        for start in tl.range(0, V, x.shape[0]):
            y = raw(logits_ptr, start + tl.arange(0, x.shape[0]), V)
            inside = _within(y, top, step, first, last, BINS)
            low = tl.minimum(low, tl.where(inside, key_of(y, SHIFT), low))
            high = tl.maximum(high, tl.where(inside, key_of(y, SHIFT), high))
    else:
        inside = _within(x, top, step, first, last, BINS)
        low = tl.where(inside, key_of(x, SHIFT), low)
        high = tl.where(inside, key_of(x, SHIFT), high)
    return tl.min(low, axis=0), tl.max(high, axis=0)


@triton.jit
def _tally(
    x, logits_ptr, V, top, step, factor, first, last, least,
    WHOLE: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """(count, mass) of the tokens in the bins first to last whose key is at least `least`."""
    if WHOLE:
        count = tl.zeros(x.shape, tl.int32)
        mass = tl.zeros(x.shape, tl.int64)
        for start in tl.range(0, V, x.shape[0]):
            y = raw(logits_ptr, start + tl.arange(0, x.shape[0]), V)
            inside = _within(y, top, step, first, last, BINS) & (key_of(y, SHIFT) >= least)
            count += inside.to(tl.int32)
            mass += tl.where(inside, _mass(y, top, factor), 0)
    else:
        inside = _within(x, top, step, first, last, BINS) & (key_of(x, SHIFT) >= least)
        count = inside.to(tl.int32)
        mass = tl.where(inside, _mass(x, top, factor), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _search(
    x, logits_ptr, V, top, step, factor, top_k, top_p, k_bin, k_count, k_mass, first, last, p_mass,
    WHOLE: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The least key that top_k and top_p keep."""
    floor = bottom(SHIFT)
    total = k_mass
    if k_bin < BINS:
        floor, high = _extent(x, logits_ptr, V, top, step, k_bin, k_bin, WHOLE, BINS, SHIFT)
        high += 1
        while floor + 1 < high:
            mid = middle(floor, high)
            count, _ = _tally(x, logits_ptr, V, top, step, factor, k_bin, k_bin, mid, WHOLE, BINS, SHIFT)
            floor = tl.where(k_count + count >= top_k, mid, floor)
            high = tl.where(k_count + count >= top_k, high, mid)
        _, kept = _tally(x, logits_ptr, V, top, step, factor, k_bin, k_bin, floor, WHOLE, BINS, SHIFT)
        total += kept
    least = floor
    if top_p < 1.0:
        low, least = _extent(x, logits_ptr, V, top, step, first, last, WHOLE, BINS, SHIFT)
        low -= 1
        while low + 1 < least:
            mid = middle(low, least)
            lowest = tl.maximum(mid + 1, floor)
            _, mass = _tally(x, logits_ptr, V, top, step, factor, first, last, lowest, WHOLE, BINS, SHIFT)
            above = (p_mass + mass).to(tl.float64) < _goal(top_p, total)
            least = tl.where(above, mid, least)
            low = tl.where(above, low, mid)
    return tl.maximum(least, floor)


@triton.jit
def collect_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, flat_ptr, scales_ptr, bin_counts_ptr, bin_masses_ptr,
    collected_ptr, thresholds_ptr, V,
    BINS: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [B, parts]: gathers the tokens of the decisive bins; a row's last program raises its threshold.

    flat [B, 3]: whether the row is flat, tokens gathered, programs that have arrived.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(flat_ptr + row * 3) == 0:
        return
    logits_ptr += row * V
    x = raw(logits_ptr, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), V)
    top, step = tl.load(scales_ptr + row * 2), tl.load(scales_ptr + row * 2 + 1)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    index = tl.arange(0, BINS)
    counts, masses = tl.load(bin_counts_ptr + row * BINS + index), tl.load(bin_masses_ptr + row * BINS + index)
    k_bin, k_count, k_mass, first, last, p_mass = _bins_of_interest(counts, masses, top_k, top_p, BINS)
    decisive = (index == k_bin) | ((index >= first) & (index <= last))
    fits = tl.sum(tl.where(decisive, counts, 0), axis=0) <= ROOM
    if fits:
        chosen = _within(x, top, step, k_bin, k_bin, BINS) | _within(x, top, step, first, last, BINS)
        slot = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        base = tl.atomic_add(flat_ptr + row * 3 + 1, tl.sum(chosen.to(tl.int32), axis=0), sem="relaxed")
        tl.store(collected_ptr + row * ROOM + base + slot, x, mask=chosen)
    # The barrier puts every thread's stores before the one thread's release.
    tl.debug_barrier()
    if tl.atomic_add(flat_ptr + row * 3 + 2, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        factor = inverse(tl.load(temperature_ptr + row))
        if fits:
            i = tl.arange(0, ROOM)
            filled = tl.load(flat_ptr + row * 3 + 1, cache_modifier=".cg")
            at = collected_ptr + row * ROOM + i
            y = tl.load(at, mask=i < filled, other=NEGATIVE_INFINITY, cache_modifier=".cg")
            least = _search(
                y, logits_ptr, V, top, step, factor, top_k, top_p, k_bin, k_count, k_mass, first, last, p_mass,
                False, BINS, SHIFT,
            )  # fmt: skip
        else:
            least = _search(
                x, logits_ptr, V, top, step, factor, top_k, top_p, k_bin, k_count, k_mass, first, last, p_mass,
                True, BINS, SHIFT,
            )  # fmt: skip
        threshold = float_of(least, SHIFT) * factor
        tl.store(thresholds_ptr + row, tl.maximum(tl.load(thresholds_ptr + row), threshold))
