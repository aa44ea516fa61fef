"""Op `paged_attention`: one query per sequence over its keys in the paged cache.

    paged_attention(q [N, Hq, D], k_cache [P, Hkv, page, D], v_cache, block_tables [N, M] int32, lengths [N] int32, *,
                    scale, window=None, softcap=None, sinks [Hq] | None, scales=None, plan=None, newest=1)
        -> [N, Hq, D]

`lengths` counts the keys of a sequence, the current token included; 0 marks a padding row, whose output is zero.
`window`: a query at position p sees keys at positions > p - window. `softcap`: scores become
softcap * tanh(score / softcap). `sinks`: one more score per head, without a value. `scales`
(`CacheScales`): the caches are float8_e4m3fn, and keys and values are their numbers times these factors. Pool
positions that are not seen never reach the result, whatever they and their factors hold.

`plan`: the `attention_plan` of these lengths, this window and this number of kv heads, written before the step's chain
began (see there); it decides how work is cut, never what is seen. Without one the op makes its own, one more launch.
Only the `newest` keys of a sequence may come from the step's own earlier kernels: the others are read before these
have finished.
"""

from cuformers.kernels.op import two_ways

OP = two_ways(__name__, "paged_attention")
