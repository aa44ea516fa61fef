"""What writes an fp8 cache, judged by bits, as rounding to fp8 passes no tolerance; for the interpreter and a GPU."""

from typing import Any

import torch
from torch import Tensor

from cuformers.kernels.cache_scales import FP8, CacheScales, bytes_of, quantized

from .attention_cases import AttentionShape, DecodeShape, RopeShape, decode, ropes

WRITES = (
    RopeShape(3, 4, 2, 128, 128, "qk"),
    RopeShape(2, 4, 2, 80, 32, "q"),
    RopeShape(33, 4, 2, 96, 96, "k"),
    RopeShape(2, 2, 1, 64, 0),
)
DECODES = (
    DecodeShape(AttentionShape((70, 0, 33), 4, 2, 128), 128, norm=True),
    DecodeShape(AttentionShape((64, 1, 65), 4, 4, 64, page=64), 48),
    DecodeShape(AttentionShape((100, 7), 7, 1, 64, page=128, window=20), 0, norm=True),
)


def check_write(shape: RopeShape, dtype: torch.dtype, device: torch.device) -> None:
    """Each token's head lies at its slot as `quantized` makes it of the op's own result; nothing else is touched."""
    from cuformers.kernels.rope_cache.triton import rope_cache

    torch.manual_seed(0)
    call = ropes((shape,))[0].make(dtype, device)
    slots, plain = call.kwargs["slots"].long(), call.kwargs["k_cache"]
    expected = rope_cache(call.args[0].clone(), *call.args[1:], **call.kwargs)
    data = torch.full((2, *plain.shape), torch.nan, device=device).to(FP8)
    scale = torch.full((2, *plain.shape[:-1]), torch.nan, device=device)
    fp8: dict[str, Any] = {"k_cache": data[0], "v_cache": data[1], "scales": CacheScales(*scale)}
    found = rope_cache(call.args[0].clone(), *call.args[1:], **(call.kwargs | fp8))
    assert all(torch.equal(a, b) for a, b in zip(found, expected)), "results are not rounded to fp8"
    written = slots >= 0
    page, offset = slots[written] // 16, slots[written] % 16
    for x, numbers, factors in zip(found[1:], data, scale):
        want = quantized(x[written])
        assert torch.equal(factors[page, :, offset], want.scale)
        assert torch.equal(bytes_of(numbers)[page, :, offset], bytes_of(want.data))
    for tensor in (data.float(), scale):
        tensor[:, page, :, offset] = torch.nan
        assert tensor.isnan().all()


def check_decode(shape: DecodeShape, dtype: torch.dtype, device: torch.device) -> None:
    """It is `rope_cache`, then `paged_attention`, with the newest key and value as they were rounded."""
    from cuformers.kernels.decode_attention.triton import decode_attention
    from cuformers.kernels.paged_attention import reference
    from cuformers.kernels.paged_attention.triton import paged_attention
    from cuformers.kernels.rope_cache.triton import rope_cache

    torch.manual_seed(0)
    arguments = fp8_decode(shape, dtype, device)
    names = ("k_cache", "v_cache", "scales")
    ours, theirs = ({name: _copy(arguments[name]) for name in names} for _ in range(2))
    out = decode_attention(**(arguments | ours | {"qkv": arguments["qkv"].clone()}))  # which may be rotated in place
    s = shape.attention
    write = {name: arguments[name] for name in ("cos", "sin", "rows", "slots", "q_norm", "k_norm") if name in arguments}
    heads = {"num_heads": s.heads, "num_kv_heads": s.kv_heads, "head_dim": s.dim}
    q, _, _ = rope_cache(arguments["qkv"].clone(), **write, **heads, **theirs)
    read = {name: arguments[name] for name in ("block_tables", "lengths", "scale", "window", "softcap")}
    assert out.isfinite().all() and torch.equal(out, paged_attention(q, **read, **theirs))
    for name in names:
        for a, b in zip(_parts(ours[name]), _parts(theirs[name])):
            assert torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))
    exact = reference.paged_attention(q.float(), **read, **theirs)
    assert (out.float() - exact).norm() <= 1.5e-2 * exact.norm()


def fp8_decode(shape: DecodeShape, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of decode_attention over an fp8 cache that is NaN, factors too, where no key is seen."""
    arguments = decode(shape, False, dtype, device).kwargs
    data, scale = quantized(torch.stack((arguments["k_cache"], arguments["v_cache"])))
    return arguments | {"k_cache": data[0], "v_cache": data[1], "scales": CacheScales(*scale)}


def _copy(value: Any) -> Any:
    return CacheScales(*(x.clone() for x in value)) if isinstance(value, tuple) else value.clone()


def _parts(value: Any) -> list[Tensor]:
    return [x.float() for x in (value if isinstance(value, tuple) else (value,))]
