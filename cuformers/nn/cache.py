"""The paged key-value cache: for each layer one tensor, cut into pages that sequences own."""

from collections.abc import Sequence

import torch
from torch import Tensor


class PagedCache:
    """Keys and values of every layer in pages of a fixed number of tokens.

    A layer's tensor is [2, pages, kv_heads, page_size, head_dim], on the device where the layer runs. Within a page,
    one head's tokens lie together, so that a decode program reads page_size * head_dim contiguous elements.
    """

    def __init__(
        self,
        *,
        devices: Sequence[torch.device],
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
    ) -> None:
        shape = (2, num_pages, num_kv_heads, page_size, head_dim)
        self.layers = [torch.empty(shape, dtype=dtype, device=device) for device in devices]
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def keys(self, layer: int) -> Tensor:
        """[pages, kv_heads, page_size, head_dim]."""
        return self.layers[layer][0]

    def values(self, layer: int) -> Tensor:
        """[pages, kv_heads, page_size, head_dim]."""
        return self.layers[layer][1]

    @staticmethod
    def page_bytes(num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers."""
        return num_layers * 2 * num_kv_heads * page_size * head_dim * dtype.itemsize
