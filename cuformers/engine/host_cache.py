"""Copies of pages in page-locked host memory, for requests that gave way and are to go on where they were."""

from collections.abc import Sequence

from cuformers.cuda.streams import pinned_empty
from cuformers.engine.plan import Swap
from cuformers.nn.cache import PagedCache


class HostCache:
    """Room for so many pages of a cache. Copies are made in the order of the stream; the host waits for none."""

    def __init__(self, cache: PagedCache, num_places: int) -> None:
        self._cache = cache
        self._copies = [pinned_empty((2, num_places, *tensor.shape[2:]), tensor.dtype) for tensor in cache.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(copy.nbytes for copy in self._copies)

    def save(self, swaps: Sequence[Swap]) -> None:
        """Copies pages to their places."""
        for tensor, copy in zip(self._cache.tensors, self._copies):
            for page, place in swaps:
                for half in range(2):  # keys, then values: each is contiguous, so that the copy needs no help
                    copy[half, place].copy_(tensor[half, page], non_blocking=True)

    def restore(self, swaps: Sequence[Swap]) -> None:
        """Copies them back, to other pages."""
        for tensor, copy in zip(self._cache.tensors, self._copies):
            for page, place in swaps:
                for half in range(2):
                    tensor[half, page].copy_(copy[half, place], non_blocking=True)
