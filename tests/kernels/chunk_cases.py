"""Cases of chunk_attention."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .attention_cases import stored
from .judge import Call, Case, randn


@dataclass(frozen=True)
class ChunkShape:
    """A chunk_attention problem: (queries, length with them) of each chunk, then `padding` queries of none."""

    chunks: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    dim: int
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    padding: int = 0
    fp8: bool = False

    def __str__(self) -> str:
        chunks = "-".join(f"{count}of{length}" for count, length in self.chunks[:4])
        more = f"w{self.window}" if self.window else ""
        more += "-fp8" if self.fp8 else ""
        return f"{chunks}x{len(self.chunks)}-{self.heads}h{self.kv_heads}-d{self.dim}p{self.page}{more}"


CHUNKS = (
    ChunkShape(((70, 70), (0, 0), (33, 50)), 4, 2, 64, padding=3),
    ChunkShape(((1, 1), (2, 100), (16, 16), (0, 0)), 3, 3, 96, page=32, padding=40),
    ChunkShape(((40, 61), (17, 17)), 6, 2, 80, page=64, softcap=20.0),
    ChunkShape(((5, 90), (30, 47)), 8, 1, 64, window=20, sinks=True),
    ChunkShape(((50, 150),), 2, 2, 128, page=128, window=1),
    ChunkShape(((35, 70), (9, 9)), 2, 1, 256, page=256, window=33, sinks=True, padding=1),
    ChunkShape(((4, 40), (3, 3)), 40, 1, 64, sinks=True),
    ChunkShape(((0, 0), (0, 5)), 2, 1, 64, sinks=True, padding=7),
    ChunkShape(((70, 70), (0, 0), (33, 50)), 4, 2, 64, padding=3, fp8=True),
    ChunkShape(((40, 61), (17, 17)), 6, 2, 80, page=64, softcap=20.0, fp8=True),
    ChunkShape(((5, 90), (30, 47)), 8, 1, 64, window=20, sinks=True, fp8=True),
)


def chunks(shapes: tuple[ChunkShape, ...] = CHUNKS) -> list[Case]:
    """chunk_attention on a pool that is NaN wherever no query may look; queries are slices of wider rows."""
    return [Case("chunk_attention", str(s), lambda dtype, device, s=s: chunk(s, dtype, device)) for s in shapes]


def chunk(s: ChunkShape, dtype: torch.dtype, device: torch.device) -> Call:
    """The call of one shape; chunk n's row of the tables is not row n."""
    N = len(s.chunks)
    bounds = torch.tensor([0, *accumulate(count for count, _ in s.chunks)], dtype=torch.int32)
    rows = torch.randperm(N + 2)[:N].int()
    pool, tables = _filled_pool(s, rows)
    lengths = torch.tensor([length for _, length in s.chunks], dtype=torch.int32)
    T = int(bounds[-1]) + s.padding
    q = randn(T, (s.heads + 2) * s.dim, dtype=dtype, device=device)[:, : s.heads * s.dim].unflatten(1, (s.heads, s.dim))
    kwargs: dict[str, Any] = {"scale": s.dim**-0.5, "window": s.window, "softcap": s.softcap}
    kwargs["sinks"] = torch.randn(s.heads).to(device, dtype) if s.sinks else None
    integers = (x.to(device) for x in (tables, bounds, rows, lengths))
    pool, more = stored(pool, s.fp8, dtype, device)
    return Call((q, *pool, *integers), kwargs | more)


def _filled_pool(s: ChunkShape, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(keys and values [2, P, Hkv, page, D], tables [rows, M]): NaN where no query looks, nonsense for absent pages."""
    blocks = -(-max(length for _, length in s.chunks) // s.page)
    tables = torch.full((len(rows) + 2, blocks), -7, dtype=torch.int32)
    free = torch.randperm(len(rows) * blocks + 1).int()
    pool = torch.full((2, len(free), s.kv_heads, s.page, s.dim), torch.nan)
    for n, (count, length) in enumerate(s.chunks):
        used = -(-length // s.page)
        tables[rows[n], :used] = free[n * blocks : n * blocks + used]
        low = 0 if s.window is None else max(0, length - count + 1 - s.window)
        position = torch.arange(low, length if count else 0)
        page = tables[rows[n], position // s.page].long()
        pool[:, page, :, position % s.page] = torch.randn(len(position), 2, s.kv_heads, s.dim)
    return pool, tables
