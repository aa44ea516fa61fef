"""Op `decode_attention`: a decode step's attention from the projected row on.

    decode_attention(qkv [N, (Hq + 2 * Hkv) * D], cos [R, rot / 2] | None, sin, rows [N] int32,
                     k_cache [P, Hkv, page, D], v_cache, slots [N] int32, block_tables [N, M] int32, lengths [N] int32,
                     *, num_heads, scale, q_norm=None, k_norm=None, window=None, softcap=None, sinks [Hq] | None,
                     scales=None, plan=None, newest=1)
        -> [N, Hq, D]

It is `rope_cache` followed by `paged_attention`: norms and rotation of queries and key, the newest key and value to
the cache at its slot, and one query per sequence over all its keys. Queries and keys are both normalised or neither
is. A row of length 0 is padding: its slot is negative, its output zero. A row with keys has a slot, that of position
length - 1. `sinks`, `scales`, `plan`, `newest`: see `rope_cache` and `paged_attention`; of an fp8 cache the newest key
and value too are read as they were rounded.
"""

from cuformers.kernels.op import two_ways

OP = two_ways(__name__, "decode_attention")
