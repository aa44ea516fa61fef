"""How the products of few rows are cut: a small rule for each kernel, and a table of shapes that were measured."""

from typing import NamedTuple

MAX_ROWS = 16
"""Up to this many rows products may have kernels of their own, norm and residual riding along."""


class FmaConfig(NamedTuple):
    """How a product by multiply and sum is cut."""

    block_n: int
    """Outputs per program."""
    block_k: int
    """Columns per chunk, all chunks being in registers at once."""
    num_warps: int
    """Warps per program."""

    @property
    def copies(self) -> int:
        """Rows of x and of the norm's weight that a program loads. Up to 256 columns each warp has weight rows of its
        own, and loads x for itself; above, warps share a row, and one copy is spread over them."""
        return self.block_n if self.block_k <= 256 else 1


class MmaConfig(NamedTuple):
    """How a product on tensor cores is cut; outputs and columns per warp are the kernel's own."""

    num_warps: int
    """Warps per program, which share K."""
    ahead: int
    """Chunks of weights in registers at once, at the most."""


TABLE: dict[tuple[int, int, int, bool], FmaConfig] = {
    (4096, 1024, 1, False): FmaConfig(2, 1024, 4),  # Qwen3-0.6B qkv
    (1024, 2048, 1, False): FmaConfig(2, 1024, 4),  # Qwen3-0.6B o
    (3072, 1024, 1, True): FmaConfig(2, 1024, 2),  # Qwen3-0.6B gate_up
    (6144, 4096, 1, False): FmaConfig(2, 512, 4),  # Qwen3-8B qkv
    (12288, 4096, 1, True): FmaConfig(2, 1024, 4),  # Qwen3-8B gate_up
}
"""(N, K, rows rounded up to a power of two, gated) -> measured best; shapes that are absent follow the rule.

Measured on one H200 as the time of a whole decode step, 2026-12-01.
"""


def fma_config(N: int, K: int, T: int, *, gated: bool = False, num_sms: int = 132) -> FmaConfig:
    """Block sizes for x [T, K] times a weight of N outputs (2N rows where gated), 2-byte elements.

    Example:
        >>> fma_config(4096, 1024, 2)
        FmaConfig(block_n=4, block_k=1024, num_warps=4)
    """
    found = TABLE.get((N, K, 1 << (T - 1).bit_length(), gated))
    if found is not None:
        return found
    num_warps = 4 if K <= 4096 else 8
    # 8 columns a thread: loads of 16 bytes. A last chunk that K does not fill is masked.
    block_k = min(256 * num_warps, 1 << (K - 1).bit_length())
    block_n = 1
    # More rows per program while the card still gets 5 programs a multiprocessor and a thread holds 128 bytes at most.
    while -(-N // (2 * block_n)) >= 5 * num_sms and 2 * block_n * _bytes_per_thread(K, gated, num_warps) <= 128:
        block_n *= 2
    return FmaConfig(block_n, block_k, num_warps)


def _bytes_per_thread(K: int, gated: bool, num_warps: int) -> float:
    """Weight bytes that a thread holds for one output."""
    return K * 2 * (2 if gated else 1) / (32 * num_warps)


def mma_config(N: int, K: int, *, gated: bool = False, num_sms: int = 132) -> MmaConfig:
    """Warps share K: twice as many where programs of 16 outputs are few, or K is long.

    Example:
        >>> mma_config(1024, 2048), mma_config(3072, 1024, gated=True)
        (MmaConfig(num_warps=8, ahead=4), MmaConfig(num_warps=4, ahead=2))
    """
    return MmaConfig(8 if N < 16 * num_sms or K > 8192 else 4, 2 if gated else 4)
