"""The paged key-value cache: one tensor for all layers, cut into pages that sequences own."""

import torch
from torch import Tensor


class PagedCache:
    """Keys and values of every layer in pages of a fixed number of tokens.

    Layout [layers, 2, pages, kv_heads, page_size, head_dim]: within a page, one head's tokens lie together, so that
    a decode program reads page_size * head_dim contiguous elements.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)
        self.num_pages = num_pages
        self.page_size = page_size

    def keys(self, layer: int) -> Tensor:
        """[pages, kv_heads, page_size, head_dim]."""
        return self.data[layer, 0]

    def values(self, layer: int) -> Tensor:
        """[pages, kv_heads, page_size, head_dim]."""
        return self.data[layer, 1]

    @staticmethod
    def page_bytes(num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers."""
        return num_layers * 2 * num_kv_heads * page_size * head_dim * dtype.itemsize
