"""Op `chunk_attention`: several queries per sequence over its keys in the paged cache.

    chunk_attention(q [T, Hq, D], k_cache [P, Hkv, page, D], v_cache, block_tables [B, M] int32, bounds [N + 1] int32,
                    rows [N] int32, lengths [N] int32, *,
                    scale, window=None, softcap=None, sinks [Hq] | None, scales=None) -> [T, Hq, D]

Chunk n owns the queries q[bounds[n] : bounds[n + 1]]. Its keys are the first lengths[n] tokens of row rows[n] of
`block_tables`, its own tokens included: whoever calls has written them to the cache. Its last query is at position
lengths[n] - 1 and every query sees the positions up to its own. `bounds` ascends from 0 and ends anywhere up to T;
queries from bounds[N] on are padding, whose output is zero, and a chunk may be empty. All numbers about chunks are read
on the device, so that a captured graph serves any chunks that fit T and N.
`window`: a query at position p sees keys at positions > p - window. `softcap`: scores become
softcap * tanh(score / softcap). `sinks`: one more score per head, without a value. `scales`
(`CacheScales`): the caches are float8_e4m3fn, and keys and values are their numbers times these factors.
`q` may be a slice of wider rows. Pool positions that no query of a chunk sees never reach the result, whatever they
and their factors hold.
"""

from cuformers.kernels.op import two_ways

OP = two_ways(__name__, "chunk_attention")
