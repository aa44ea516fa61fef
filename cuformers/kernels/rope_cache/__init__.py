"""Op `rope_cache`: head norms, rotary embedding (arXiv 2104.09864) and the cache write, in one launch.

    rope_cache(qkv [T, (Hq + 2 * Hkv) * D], cos [R, rot / 2] | None, sin [R, rot / 2] | None, rows [T] int32, *,
               num_heads, num_kv_heads, head_dim, q_norm=None, k_norm=None,
               k_cache [P, Hkv, page, D] | None, v_cache [P, Hkv, page, D] | None, slots [T] int32 | None,
               scales=None)
        -> (q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D])

cos and sin are float32; token t uses row rows[t]; None means no rotation. Pairs are (i, i + rot / 2), the convention
of rotate_half; dims from rot on pass through. Slot s lies at page s // page, offset s % page; a negative slot writes
nothing. qkv may be overwritten, and the results may be views of it.

`scales` (`CacheScales`) says that the caches are float8_e4m3fn: a head of a token is written as its numbers over the
least power of two that brings them within fp8's range, and that factor to `scales` at the same slot. The results are
not rounded so.
"""

from cuformers.kernels.op import two_ways

OP = two_ways(__name__, "rope_cache")
