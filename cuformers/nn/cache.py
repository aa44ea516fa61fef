"""The paged key-value cache: one pool of pages, which layers share by groups."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.kernels.cache_scales import FP8, CacheScales


class CacheLayout(NamedTuple):
    """How layers are grouped: the layers of a group need the keys of the same positions, so they share block tables.

    Groups have the same size, so that any page serves any group: within a page, the k-th layer of every group uses
    the k-th tensor of the pool. Where layers of a kind do not fill their last group, a little of the pool is unused.
    """

    windows: tuple[int | None, ...]
    """For each group the sliding window of its layers; None sees all."""
    size: int
    """Layers of a group."""
    places: tuple[tuple[int, int], ...]
    """For each layer its group, and its number within the group."""


def layout(windows: Sequence[int | None], *, apart: bool = True) -> CacheLayout:
    """Groups the layers by window.

    Args:
        windows: of each layer; None sees all.
        apart: False makes one group of all layers, none of which then frees what has left its window.

    Example:
        >>> layout([8, 8, None])
        CacheLayout(windows=(None, 8, 8), size=1, places=((1, 0), (2, 0), (0, 0)))
    """
    if not apart:
        return CacheLayout((None,), len(windows), tuple((0, i) for i in range(len(windows))))
    kinds = sorted(set(windows), key=lambda w: (w is not None, w or 0))
    size = min(windows.count(kind) for kind in kinds)
    groups: list[int | None] = []
    places: dict[int, tuple[int, int]] = {}
    for kind in kinds:
        layers = [i for i, window in enumerate(windows) if window == kind]
        for number, layer in enumerate(layers):
            places[layer] = (len(groups) + number // size, number % size)
        groups += [kind] * -(-len(layers) // size)
    return CacheLayout(tuple(groups), size, tuple(places[i] for i in range(len(windows))))


class PagedCache:
    """Keys and values in pages of a fixed number of tokens.

    The pool is one tensor [2, pages, kv_heads, page_size, head_dim] for each place within a group. Within a page, one
    head's tokens lie together, so that a decode program reads page_size * head_dim contiguous elements. With dtype
    float8_e4m3fn there are factors beside it, [2, pages, kv_heads, page_size] float32: see `kernels.cache_scales`.
    """

    def __init__(
        self,
        *,
        layout: CacheLayout,
        devices: Sequence[torch.device],
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
    ) -> None:
        shape = (2, num_pages, num_kv_heads, page_size, head_dim)
        where = {number: devices[layer] for layer, (_, number) in enumerate(layout.places)}
        places = [where[number] for number in range(layout.size)]
        self.pool = [torch.empty(shape, dtype=dtype, device=device) for device in places]
        self.factors = [torch.empty(shape[:-1], device=device) for device in places] if dtype == FP8 else []
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """All that pages consist of: page p is [:, p] of each."""
        return [*self.pool, *self.factors]

    def group(self, layer: int) -> int:
        """The group that a layer is in."""
        return self.layout.places[layer][0]

    def keys(self, layer: int) -> Tensor:
        """[pages, kv_heads, page_size, head_dim]."""
        return self.pool[self.layout.places[layer][1]][0]

    def values(self, layer: int) -> Tensor:
        """[pages, kv_heads, page_size, head_dim]."""
        return self.pool[self.layout.places[layer][1]][1]

    def scales(self, layer: int) -> CacheScales | None:
        """Factors of an fp8 cache's numbers."""
        return CacheScales(*self.factors[self.layout.places[layer][1]]) if self.factors else None

    @staticmethod
    def page_bytes(num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page of a pool for groups of so many layers."""
        head = head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == FP8 else 0)
        return num_layers * 2 * num_kv_heads * page_size * head
