"""Op `attention_plan`: a decode step's attention as a list of equal pieces of work, made on the device.

    attention_plan(lengths [N] int32, *, num_kv_heads, window=None, block=64, stretch=None, longest=None,
                   num_sms=None, rule=None) -> AttentionPlan

`lengths` counts the keys of each sequence, `window` limits which are seen (see `paged_attention`). All layers of the
same window and number of kv heads share one plan of a step. Sequences are cut into stretches of whole blocks of
`block` keys, about as many as keep `num_sms` multiprocessors (None: the device's) evenly busy; a row of 0 keys has one
empty stretch. Cuts depend on what else is in the batch, so that rounding does.

`stretch`, a multiple of `block`, makes every row's cut depend on its own length only: ceil(keys / stretch) pieces. It
needs `longest`, the most keys that a row may ever have, and takes N * ceil(longest / stretch) items.

Sizes depend on N and the options alone, never on a length, so that one captured graph serves all lengths. `rule`
replaces the constants, for tuning.

Order on the device: the plan is written by an ordinary launch, without programmatic dependent launch, so it sees the
lengths of whatever ran before (the previous step's `advance`). Kernels of the decode chain read it before they wait
for their predecessor: another ordinary kernel, such as the embedding's, must lie between the plan and the first of
them. See `kernels/launch.py`.
"""

from typing import NamedTuple

from torch import Tensor

from cuformers.kernels.op import two_ways


class AttentionPlan(NamedTuple):
    """Which keys of which sequence each piece of work covers; the longest pieces come first."""

    items: Tensor
    """[I, 4] int32: row (-1: no work), first and last + 1 visible key, and flags: ALONE, NEWEST."""
    split_rows: Tensor
    """[R, 4] int32: each row of more than one item: row (-1: none), its first item, how many; the last is 0."""


ALONE = 1
"""Flag of an item that is its row's only one."""
NEWEST = 2
"""Flag of an item that holds its row's newest key."""


OP = two_ways(__name__, "attention_plan")
