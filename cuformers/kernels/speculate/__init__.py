"""Ops of speculative decoding by prompt lookup: rows of the `DecodeState` take several tokens in one step.

    draft_lookup(state, count, longest=3) -> drafts [B, count] int64
    spread_drafts(state, drafts [B, K] int64) -> DraftRows
    accept(sampled [B, K + 1] int64, drafts [B, K] int64, state) -> emitted [B, K + 1] int64, and in place

`draft_lookup` guesses the next tokens of each busy row: it looks in the row's own history for the last earlier place
where the row's last n tokens stand, n from `longest` down to 1, and copies what followed them; after the row's last
token it goes on with the first of them again, as a text does that repeats itself. -1 stands where nothing was found.
`count` and `longest` are at least 1.

`spread_drafts` makes K + 1 rows of each row b, which feed its own token and its drafts: row b * (K + 1) + j stands at
position positions[b] + j and sees the keys up to its own. A draft runs only where those before it run, and where a
token after it fits the limit. So pages must be there for the positions up to min(positions + K, limits - 2).

`accept` takes what the model sampled after each of these rows. The first token is emitted; each next one where the
draft before it is what was sampled there and did not end the row. `emitted` ends with -1 for those that are not. The
state becomes what `advance` makes of the emitted tokens, one after the other. Idle rows emit nothing.

Nothing here changes what a row says: a token that is emitted was sampled after exactly the tokens before it, so a
sampler whose noise depends on the row's seed and the position alone draws what it would draw without drafts.
Method: Saxena, "Prompt Lookup Decoding" (2023); Leviathan et al., arXiv:2211.17192, for the verification.
"""

from typing import NamedTuple

from torch import Tensor

from cuformers.kernels.op import two_ways


class DraftRows(NamedTuple):
    """What a step reads: R = B * (K + 1) rows. One that does not run has token, position and length 0 and no slot."""

    tokens: Tensor
    """[R], int64."""
    positions: Tensor
    """[R], int32."""
    lengths: Tensor
    """[R], int32: keys each row attends to, its own included."""
    slots: Tensor
    """[G, R], int32: where keys and values go, by group of layers; -1 writes nothing."""
    block_tables: Tensor
    """[G, R, M], int32: the pages of the row that each is from."""


DRAFT_LOOKUP = two_ways(__name__, "draft_lookup")
SPREAD_DRAFTS = two_ways(__name__, "spread_drafts")
ACCEPT = two_ways(__name__, "accept")
