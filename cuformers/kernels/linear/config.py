"""Block sizes of the skinny products: a small rule, and a table of shapes that were measured."""

from typing import NamedTuple

FMA_ROWS = 4
"""Up to this many rows are multiplied and summed; more go to tensor cores."""
MAX_ROWS = 16
"""Up to this many rows the skinny kernels are used."""


class SkinnyConfig(NamedTuple):
    """How a skinny product is cut."""

    block_n: int
    """Outputs per program."""
    block_k: int
    """FMA: columns per chunk, all chunks being in registers at once. Dot: columns per slice and loop step."""
    slices: int
    """Dot: slices of K that warps share in one loop step; 1 for FMA."""
    num_warps: int
    """Warps per program."""

    @property
    def copies(self) -> int:
        """FMA: rows of x and of the norm's weight that a program loads. Up to 256 columns each warp has weight rows of
        its own, and loads x for itself; above, warps share a row, and one copy is spread over them."""
        return self.block_n if self.block_k <= 256 else 1


TABLE: dict[tuple[int, int, int, bool], SkinnyConfig] = {
    (4096, 1024, 1, False): SkinnyConfig(2, 1024, 1, 4),  # Qwen3-0.6B qkv
    (1024, 2048, 1, False): SkinnyConfig(2, 1024, 1, 4),  # Qwen3-0.6B o
    (3072, 1024, 1, True): SkinnyConfig(2, 1024, 1, 2),  # Qwen3-0.6B gate_up
    (6144, 4096, 1, False): SkinnyConfig(2, 512, 1, 4),  # Qwen3-8B qkv
    (12288, 4096, 1, True): SkinnyConfig(2, 1024, 1, 4),  # Qwen3-8B gate_up
}
"""(N, K, rows rounded up to a power of two, gated) -> measured best; shapes that are absent follow the rule.

Measured on one H200 as the time of a whole decode step, 2026-12-01.
"""


def config(N: int, K: int, T: int, *, gated: bool = False, num_sms: int = 132) -> SkinnyConfig:
    """Block sizes for x [T, K] times a weight of N outputs (2N rows where gated), 2-byte elements.

    Example:
        >>> config(4096, 1024, 1)
        SkinnyConfig(block_n=4, block_k=1024, slices=1, num_warps=4)
    """
    rows = 1 << (T - 1).bit_length()
    found = TABLE.get((N, K, rows, gated))
    if found is not None:
        return found
    return _fma(N, K, gated, num_sms) if T <= FMA_ROWS else _dot(N, K, gated, num_sms)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _fma(N: int, K: int, gated: bool, num_sms: int) -> SkinnyConfig:
    num_warps = 4 if K <= 4096 else 8
    # 8 columns a thread: loads of 16 bytes. A last chunk that K does not fill is masked.
    block_k = min(256 * num_warps, _power_of_two(K))
    block_n = 1
    # More rows per program while the card still gets 5 programs a multiprocessor and a thread holds 128 bytes at most.
    while -(-N // (2 * block_n)) >= 5 * num_sms and 2 * block_n * _bytes_per_thread(K, gated, num_warps) <= 128:
        block_n *= 2
    return SkinnyConfig(block_n, block_k, 1, num_warps)


def _bytes_per_thread(K: int, gated: bool, num_warps: int) -> float:
    """Weight bytes that a thread holds for one output."""
    return K * 2 * (2 if gated else 1) / (32 * num_warps)


def _dot(N: int, K: int, gated: bool, num_sms: int) -> SkinnyConfig:
    block_n = 16 if N >= 16 * num_sms and not gated else 8
    if N >= 64 * num_sms:
        block_n *= 2
    num_warps = 4
    # A thread holds about 128 bytes of weights, twice over: those in use and those in flight.
    span = 128 * 32 * num_warps // (2 * block_n * (2 if gated else 1))
    block_k = max(32, min(span, _power_of_two(K)) // num_warps)
    return SkinnyConfig(block_n, block_k, num_warps, num_warps)
