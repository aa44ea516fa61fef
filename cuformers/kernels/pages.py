"""What the kernels that read a paged cache ask of it."""

from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.kernels.cache_scales import FP8, CacheScales


def readable(q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: CacheScales | None) -> Tensor:
    """Queries [T, Hq, D] with contiguous heads, for pages [P, Hkv, page, D]; q may be a slice of wider rows.

    Raises:
        ValueError: a page size, head dim or number of heads that the kernels are not made for.
    """
    PAGE, D = k_cache.shape[2:]
    if PAGE < 16 or PAGE & (PAGE - 1):
        raise bad_argument("page_size", PAGE, "a power of two from 16 on")
    if not 16 <= D <= 256:
        raise bad_argument("head_dim", D, "16 to 256", "Use kernels='reference' for this model.")
    if scales is not None and D % 2:
        raise bad_argument("head_dim", D, "an even number for an fp8 cache", "Use kv_cache_dtype='auto'.")
    if q.shape[1] % k_cache.shape[1]:
        raise bad_argument("num_heads", q.shape[1], f"a multiple of num_kv_heads={k_cache.shape[1]}")
    pages_are_contiguous = k_cache[:1].is_contiguous() and v_cache[:1].is_contiguous()
    dtype = q.dtype if scales is None else FP8
    assert pages_are_contiguous and k_cache.dtype == v_cache.dtype == dtype, f"pages are contiguous, in {dtype}"
    assert scales is None or scales.keys.stride() == scales.values.stride(), "scales are two halves of one tensor"
    return q if q.stride(1) == D and q.stride(2) == 1 else q.contiguous()
