"""Ops `sample` and `argmax`: from logits to tokens, without the host looking at a value.

    sample(logits [B, V], temperature [B] f32, top_k [B] i32, top_p [B] f32, min_p [B] f32, seeds [B] i64,
           positions [B] i64) -> [B] int64
    argmax(logits [B, V]) -> [B] int64

Off is: temperature 0 (the row is greedy), top_k 0, top_p 1, min_p 0. The order is that of Transformers: temperature,
then top_k (all ties of the k-th value stay), top_p on what top_k left, min_p last. The token is the argmax of scaled
logit + Gumbel noise, whose bits are a function of (seed, position, token id) alone: a request draws the same tokens
whatever shares its batch. Rows without any finite logit give token 0. B and V are at least 1.
"""

from cuformers.kernels.op import two_ways

SAMPLE = two_ways(__name__, "sample")
ARGMAX = two_ways(__name__, "argmax")
