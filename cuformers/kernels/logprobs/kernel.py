"""Log-probabilities in two stages: the vocabulary in splits, then each row by one program.

No split looks for its likeliest tokens: it only notes the best logit of each group of neighbours. The `top` likeliest
tokens lie in the `top` groups with the best bests, and those in the `top` families of groups with the best bests. The
second stage descends from families to groups to tokens, and sorts a few hundred numbers at each level.
"""

import triton
import triton.language as tl

from cuformers.kernels.sample.keys_kernel import NEGATIVE_INFINITY, float_of, key_of


@triton.jit
def _ordered(x):
    """Numbers that compare as the spec says: NaN as -inf, and one zero only."""
    x = tl.where(x == x, x, NEGATIVE_INFINITY)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def split_kernel(
    logits_ptr, picked_ptr, tops_ptr, sums_ptr, above_ptr, bests_ptr, V,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [R, splits]. Of BLOCK tokens: the largest logit, the softmax sum relative to it, how many logits are above
    the picked token's; and, where TOP likeliest tokens are wanted, the largest logit of each GROUP."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(picked_ptr + row)
    if token < 0:
        return
    logits_ptr += row * V
    group = split * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    index = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + index, mask=index < V, other=NEGATIVE_INFINITY).to(tl.float32)
    bests = _ordered(tl.max(x, axis=1))  # a maximum passes over NaN
    top = tl.max(bests, axis=0)
    picked = _ordered(tl.load(logits_ptr + token).to(tl.float32))
    above = tl.full((), 0, tl.int32)
    if top > picked:  # in few splits, as mostly likely tokens are picked
        above = tl.sum((x > picked).to(tl.int32))
    at = row * tl.num_programs(1) + split
    tl.store(tops_ptr + at, top)
    tl.store(sums_ptr + at, tl.sum(tl.exp(x - tl.where(top == NEGATIVE_INFINITY, 0.0, top))))
    tl.store(above_ptr + at, above)
    if TOP > 0:
        tl.store(bests_ptr + row * GROUPS + group, bests, mask=group < GROUPS)


@triton.jit
def _best(x, COUNT: tl.constexpr, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """(numbers, places) of the COUNT largest of 2**BITS numbers, larger first, then the one that comes first.

    Number and place are packed into one integer, of 32 bits where the logits' dtype lets them fit.
    """
    last: tl.constexpr = (1 << BITS) - 1
    key = key_of(x, SHIFT)
    if BITS > SHIFT:
        key = key.to(tl.int64)
    found = tl.topk((key << BITS) | (last - tl.arange(0, last + 1)), COUNT)
    return float_of((found >> BITS).to(tl.int32), SHIFT), last - (found & last).to(tl.int32)


@triton.jit
def _descend(
    ptr, parents, count, GROUP: tl.constexpr, TOP_BLOCK: tl.constexpr, BITS: tl.constexpr, SHIFT: tl.constexpr
):
    """(numbers, ids) of the TOP_BLOCK best children of as many parents, best first. `count`: children there are."""
    parents = tl.sort(parents)  # so that places are in the order of ids
    ids = parents[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _ordered(tl.load(ptr + ids, mask=ids < count, other=NEGATIVE_INFINITY).to(tl.float32))
    numbers, place = _best(tl.reshape(x, (TOP_BLOCK * GROUP,)), TOP_BLOCK, BITS, SHIFT)
    return numbers, tl.gather(parents, place // GROUP, 0) * GROUP + place % GROUP


@triton.jit
def row_kernel(
    logits_ptr, picked_ptr, tops_ptr, sums_ptr, above_ptr, bests_ptr, chosen_ptr, ranks_ptr, values_ptr, ids_ptr, V,
    SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    FAMILY_BITS: tl.constexpr, BITS: tl.constexpr, TOP: tl.constexpr, TOP_BLOCK: tl.constexpr, SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [R]: the results of a row, zeros where nothing was picked. A family is GROUP groups."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(picked_ptr + row)
    place = tl.arange(0, TOP_BLOCK)
    out = row * TOP + place
    if token < 0:
        tl.store(chosen_ptr + row, 0.0)
        tl.store(ranks_ptr + row, 0)
        tl.store(values_ptr + out, tl.zeros((TOP_BLOCK,), tl.float32), mask=place < TOP)
        tl.store(ids_ptr + out, tl.zeros((TOP_BLOCK,), tl.int64), mask=place < TOP)
        return
    logits_ptr += row * V
    split = tl.arange(0, SPLITS_BLOCK)
    at = row * SPLITS + split
    tops = tl.load(tops_ptr + at, mask=split < SPLITS, other=NEGATIVE_INFINITY)
    sums = tl.load(sums_ptr + at, mask=split < SPLITS, other=0.0)
    top = tl.max(tops, axis=0)
    total = tl.log(tl.sum(tl.exp(tops - tl.where(top == NEGATIVE_INFINITY, 0.0, top)) * sums, axis=0))
    tl.store(chosen_ptr + row, tl.load(logits_ptr + token).to(tl.float32) - top - total)
    tl.store(ranks_ptr + row, tl.sum(tl.load(above_ptr + at, mask=split < SPLITS, other=0), axis=0))
    if TOP > 0:
        bests_ptr += row * GROUPS
        group = tl.arange(0, 1 << FAMILY_BITS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        bests = tl.load(bests_ptr + group, mask=group < GROUPS, other=NEGATIVE_INFINITY)
        _, families = _best(tl.max(bests, axis=1), TOP_BLOCK, FAMILY_BITS, SHIFT)
        _, groups = _descend(bests_ptr, families, GROUPS, GROUP, TOP_BLOCK, BITS, SHIFT)
        x, ids = _descend(logits_ptr, groups, V, GROUP, TOP_BLOCK, BITS, SHIFT)
        tl.store(values_ptr + out, x - top - total, mask=place < TOP)
        tl.store(ids_ptr + out, ids.to(tl.int64), mask=place < TOP)
