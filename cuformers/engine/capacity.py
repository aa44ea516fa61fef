"""How large the engine's buffers are: powers of two, so that growing with the work means few reallocations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cuformers.base.errors import OutOfDeviceMemory
from cuformers.cuda.memory import human
from cuformers.engine.request import Request
from cuformers.nn.cache import CacheLayout

PAGE_SIZE = 64
"""Tokens of a page."""
MIN_ROWS, MAX_ROWS = 32, 256
MIN_LENGTH = 4096
MIN_EOS = 8
MEMORY_SHARE = 0.9  # of the free memory, at the most; the rest is for activations and the allocator


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Sizes that the decode state, the cache and the captured graphs are made for."""

    rows: int
    """Rows of the table: requests that run at once."""
    length: int
    """Tokens of a request, prompt and output."""
    pages: int
    """Pages of the cache."""
    eos: int
    """End-of-text tokens of a request."""

    def covers(self, other: "Capacity") -> bool:
        """Whether work that needs `other` fits."""
        return self == self.joined(other)

    def joined(self, other: "Capacity") -> "Capacity":
        """The larger of both in every size."""
        return Capacity(
            rows=max(self.rows, other.rows),
            length=max(self.length, other.length),
            pages=max(self.pages, other.pages),
            eos=max(self.eos, other.eos),
        )


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def wanted(requests: Sequence[Request], layout: CacheLayout) -> Capacity:
    """The capacity for these requests where memory is no limit.

    Args:
        requests: the work.
        layout: groups of layers, each of which needs its own pages.
    """
    pages = _pages(requests, layout)
    return Capacity(
        rows=min(MAX_ROWS, max(MIN_ROWS, power_of_two(len(requests)))),
        length=max(MIN_LENGTH, power_of_two(max(r.max_length for r in requests))),
        pages=power_of_two(max(sum(pages[:MAX_ROWS]), len(layout.windows) * MIN_LENGTH // PAGE_SIZE)),
        eos=max(MIN_EOS, power_of_two(max(len(r.eos) for r in requests))),
    )


def needed(requests: Sequence[Request], layout: CacheLayout, page_bytes: int, free: int) -> Capacity:
    """The capacity for these requests, with as many of them at once as the free memory allows.

    Args:
        requests: the work.
        layout: groups of layers, each of which needs its own pages.
        page_bytes: bytes of a page.
        free: bytes that the cache may take its share of.

    Raises:
        OutOfDeviceMemory: the longest request's cache does not fit.
    """
    most, limit = _pages(requests, layout)[0], int(free * MEMORY_SHARE) // page_bytes
    if most > limit:
        longest = max(r.max_length for r in requests)
        raise OutOfDeviceMemory(
            f"the cache for a request of {longest} tokens needs {human(most * page_bytes)}, and "
            f"{human(limit * page_bytes)} are available: shorten the prompt or max_new_tokens, or free memory."
        )
    want = wanted(requests, layout)
    return replace(want, pages=min(limit, want.pages))


def _pages(requests: Sequence[Request], layout: CacheLayout) -> list[int]:
    """Of each request, the most first."""
    return sorted((-(-r.max_length // PAGE_SIZE) * len(layout.windows) for r in requests), reverse=True)
