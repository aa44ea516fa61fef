"""Cases of rope_cache, attention_plan, paged_attention and decode_attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuformers.kernels.attention_plan import AttentionPlan
from cuformers.kernels.attention_plan.reference import attention_plan
from cuformers.kernels.cache_scales import CacheScales, dequantized, quantized
from cuformers.kernels.norm_args import Norm

from .judge import Call, Case, randn


@dataclass(frozen=True)
class RopeShape:
    """A rope_cache problem: `rot` rotated dims (0: none), which norms there are, and whether a cache is written."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    rot: int
    norm: str = ""
    cache: bool = True


ROPES = (
    RopeShape(3, 4, 2, 128, 128, "qk"),
    RopeShape(2, 4, 2, 80, 32, "q"),
    RopeShape(33, 4, 2, 96, 96, "k"),
    RopeShape(2, 2, 1, 64, 0),
    RopeShape(2, 2, 1, 64, 0, "qk"),
    RopeShape(2, 3, 3, 64, 48, cache=False),
)


def ropes(shapes: tuple[RopeShape, ...] = ROPES) -> list[Case]:
    """rope_cache; the cache starts as NaN, and one token has no slot."""
    cases = []
    for s in shapes:

        def make(dtype, device, s=s) -> Call:
            make = {"dtype": dtype, "device": device}
            qkv = randn(s.tokens, (s.heads + 2 * s.kv_heads) * s.dim, **make)
            angle = torch.rand(40, s.rot // 2, device=device) * 6 if s.rot else None
            factors = (None, None) if angle is None else (angle.cos(), angle.sin())
            rows = torch.randint(0, 40, (s.tokens,), dtype=torch.int32, device=device)
            kwargs: dict[str, Any] = {"num_heads": s.heads, "num_kv_heads": s.kv_heads, "head_dim": s.dim}
            for letter in s.norm:
                kwargs[f"{letter}_norm"] = Norm(randn(s.dim, **make), 1e-6, float(letter == "k"))
            if not s.cache:
                return Call((qkv, *factors, rows), kwargs)
            pages = -(-s.tokens // 16) + 2
            slots = torch.randperm(pages * 16)[: s.tokens].int().to(device)
            slots[-1] = -1
            pool = torch.full((2, pages, s.kv_heads, 16, s.dim), torch.nan, **make)
            kwargs |= {"k_cache": pool[0], "v_cache": pool[1], "slots": slots}
            return Call((qkv, *factors, rows), kwargs, ("k_cache", "v_cache"))

        name = f"{s.tokens}tok-{s.heads}h{s.kv_heads}-d{s.dim}r{s.rot}{s.norm}{'' if s.cache else '-nocache'}"
        cases.append(Case("rope_cache", name, make))
    return cases


@dataclass(frozen=True)
class AttentionShape:
    """A paged_attention problem; lengths of 0 are padding rows."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    fp8: bool = False


ATTENTIONS = (
    AttentionShape((70, 0, 33), 4, 2, 64),
    AttentionShape((200,), 2, 1, 128, sinks=True),
    AttentionShape((1, 16, 17), 4, 2, 80, page=64, softcap=20.0),
    AttentionShape((100, 7), 3, 3, 96, page=32, window=20),
    AttentionShape((150,), 2, 2, 256, page=128, window=50, sinks=True),
    AttentionShape((70, 0, 33), 4, 2, 64, fp8=True),
    AttentionShape((200,), 2, 1, 128, sinks=True, fp8=True),
    AttentionShape((1, 16, 17), 4, 2, 80, page=64, softcap=20.0, fp8=True),
    AttentionShape((100, 7), 3, 3, 18, page=32, window=20, fp8=True),
)


def attentions(shapes: tuple[AttentionShape, ...] = ATTENTIONS) -> list[Case]:
    """paged_attention on a pool that is NaN wherever no key may be seen."""
    cases = []
    for s in shapes:
        for planned in (False, True):
            lengths = "-".join(map(str, s.lengths))
            name = f"{lengths}-{s.heads}h{s.kv_heads}-d{s.dim}p{s.page}{'-fp8' if s.fp8 else ''}"
            name += "-planned" if planned else ""
            make = lambda dtype, device, s=s, planned=planned: attend(s, planned, dtype, device)  # noqa: E731
            cases.append(Case("paged_attention", name, make))
    return cases


def fine_plan(lengths: Tensor, s: AttentionShape) -> AttentionPlan:
    """Stretches of 48 keys: they begin within the kernel's tiles, and long rows have very many."""
    options = {"num_kv_heads": s.kv_heads, "window": s.window, "block": 16}
    return attention_plan(lengths, stretch=48, longest=max(s.lengths), **options)


def attend(s: AttentionShape, planned: bool, dtype: torch.dtype, device: torch.device) -> Call:
    """The call of one shape, with a plan or without."""
    pool, tables = filled_pool(s)
    kwargs: dict[str, Any] = {"scale": s.dim**-0.5, "window": s.window, "softcap": s.softcap}
    kwargs["sinks"] = torch.randn(s.heads).to(device, dtype) if s.sinks else None
    q = randn(len(s.lengths), s.heads, s.dim, dtype=dtype, device=device)
    lengths = torch.tensor(s.lengths, dtype=torch.int32, device=device)
    kwargs["plan"] = fine_plan(lengths, s) if planned else None
    pool, more = stored(pool, s.fp8, dtype, device)
    return Call((q, *pool, tables.to(device), lengths), kwargs | more)


def stored(pool: Tensor, fp8: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Keys and values [2, ..., D] as a cache holds them, and what a call is told of that; NaN has a factor of NaN."""
    if not fp8:
        return pool.to(device, dtype), {}
    data, scale = quantized(pool.to(device))
    return data, {"scales": CacheScales(*scale)}


def lifted(call: Call) -> tuple[Tensor, Tensor]:
    """A call's keys and values as plain numbers."""
    factors = call.kwargs.get("scales") or (None, None)
    k, v = (dequantized(cache, scale) for cache, scale in zip(call.args[1:3], factors))
    return k, v


@dataclass(frozen=True)
class PlanShape:
    """An attention_plan problem."""

    lengths: tuple[int, ...]
    window: int | None = None
    block: int = 16
    stretch: int | None = None
    num_kv_heads: int = 8
    num_sms: int = 132


PLANS = (
    PlanShape((1,)),
    PlanShape((5000,), num_sms=4),
    PlanShape((0, 0)),
    PlanShape((100, 0, 4000, 17, 64, 65), num_sms=6),
    PlanShape((100, 0, 4000, 17, 64, 65), num_sms=6, window=70),
    PlanShape((*range(0, 3300, 100),), block=64, num_kv_heads=2),
    PlanShape((700, 0, 48, 49), stretch=48),
    PlanShape((700, 0, 48, 49), stretch=48, window=100),
)


def plans(shapes: tuple[PlanShape, ...] = PLANS) -> list[Case]:
    """attention_plan, whose every number is compared."""
    cases = []
    for s in shapes:

        def make(dtype, device, s=s) -> Call:
            del dtype
            options = {"num_kv_heads": s.num_kv_heads, "window": s.window, "block": s.block, "num_sms": s.num_sms}
            fixed = {"stretch": s.stretch, "longest": max(s.lengths)} if s.stretch else {}
            return Call((torch.tensor(s.lengths, dtype=torch.int32, device=device),), options | fixed)

        name = f"{len(s.lengths)}rows-{max(s.lengths)}-w{s.window}-b{s.block}-s{s.stretch}-{s.num_sms}sms"
        cases.append(Case("attention_plan", name, make))
    return cases


def filled_pool(s: AttentionShape, newest: bool = True) -> tuple[Tensor, Tensor]:
    """(keys and values [2, P, Hkv, page, D], tables [N, M]): NaN wherever no key is seen, and at the newest position
    unless it is there already; nonsense for pages that a sequence does not have."""
    N, blocks = len(s.lengths), -(-max(s.lengths) // s.page)
    pages = N * blocks + 1
    pool = torch.full((2, pages, s.kv_heads, s.page, s.dim), torch.nan)
    tables = torch.randperm(pages)[: N * blocks].view(N, blocks).int()
    for n, length in enumerate(s.lengths):
        position = torch.arange(0 if s.window is None else max(0, length - s.window), length)
        position = position if newest else position[:-1]
        seen = torch.randn(2, len(position), s.kv_heads, s.dim)
        pool[:, tables[n, position // s.page].long(), :, position % s.page] = seen.transpose(0, 1)
        tables[n, -(-length // s.page) :] = -7
    return pool, tables


@dataclass(frozen=True)
class DecodeShape:
    """A decode_attention problem; `rot` as in RopeShape, `norm` for queries and keys."""

    attention: AttentionShape
    rot: int
    norm: bool = False


DECODES = (
    DecodeShape(AttentionShape((70, 0, 33), 4, 2, 128), 128, norm=True),
    DecodeShape(AttentionShape((64, 1, 65), 4, 4, 64, page=64), 48),
    DecodeShape(AttentionShape((0, 17, 16), 4, 1, 80, page=32, softcap=20.0), 32, norm=True),
    DecodeShape(AttentionShape((100, 7), 7, 1, 64, page=128, window=20), 0, norm=True),
    DecodeShape(AttentionShape((150,), 2, 1, 256, page=16, window=50), 256),
    DecodeShape(AttentionShape((40, 0, 9), 4, 2, 64, page=16, window=30, sinks=True), 64),
)


def decodes(shapes: tuple[DecodeShape, ...] = DECODES) -> list[Case]:
    """decode_attention on a pool that is NaN wherever no key may be seen, the newest position included."""
    cases = []
    for s in shapes:
        for planned in (False, True):
            a = s.attention
            name = f"{'-'.join(map(str, a.lengths))}-{a.heads}h{a.kv_heads}-d{a.dim}r{s.rot}p{a.page}"
            name += ("-norm" if s.norm else "") + ("-planned" if planned else "")
            make = lambda dtype, device, s=s, planned=planned: decode(s, planned, dtype, device)  # noqa: E731
            cases.append(Case("decode_attention", name, make))
    return cases


def decode(shape: DecodeShape, planned: bool, dtype: torch.dtype, device: torch.device) -> Call:
    """The call of one shape; its projected rows are a slice of wider ones."""
    s, make = shape.attention, {"dtype": dtype, "device": device}
    pool, tables = filled_pool(s, newest=False)
    lengths = torch.tensor(s.lengths, dtype=torch.int32)
    last = (lengths - 1).clamp(min=0)
    slots = tables.gather(1, last[:, None].long() // s.page)[:, 0] * s.page + last % s.page
    slots[lengths == 0] = -1
    angle = torch.rand(40, shape.rot // 2) * 6
    factors = (angle.cos().to(device), angle.sin().to(device)) if shape.rot else (None, None)
    width = (s.heads + 2 * s.kv_heads) * s.dim
    kwargs: dict[str, Any] = {"qkv": randn(len(lengths), width + 16, **make)[:, :width]}
    kwargs |= {"cos": factors[0], "sin": factors[1], "rows": torch.randint(0, 40, (len(lengths),)).int().to(device)}
    kwargs |= {"k_cache": pool[0].to(device, dtype), "v_cache": pool[1].to(device, dtype), "slots": slots.to(device)}
    kwargs |= {"block_tables": tables.to(device), "lengths": lengths.to(device), "num_heads": s.heads}
    kwargs |= {"scale": s.dim**-0.5, "window": s.window, "softcap": s.softcap}
    kwargs["sinks"] = torch.randn(s.heads).to(device, dtype) if s.sinks else None
    if shape.norm:
        kwargs |= {f"{x}_norm": Norm(randn(s.dim, **make), 1e-3, float(x == "k")) for x in "qk"}
    kwargs["plan"] = fine_plan(kwargs["lengths"], s) if planned else None
    return Call((), kwargs, ("k_cache", "v_cache"))
