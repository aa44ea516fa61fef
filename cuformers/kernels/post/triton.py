"""post as one program of one warp, so that nobody counts on before everybody has read the turn."""

import triton
import triton.language as tl
from torch import Tensor

from cuformers.kernels.launch import pdl

BLOCK = 256


@triton.jit
def post_kernel(values, box, turn, N, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    now = tl.load(turn)
    slot = box + now % SLOTS * width
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(slot + i, tl.load(values + i, mask=i < N, other=0), mask=i < N)
    tl.store(turn, now + 1)


def post(values: Tensor, slots: Tensor, turn: Tensor) -> None:
    """See the package."""
    assert values.shape[0] <= slots.shape[1] and slots.is_contiguous(), "the values fit a slot"
    post_kernel[(1,)](
        values.contiguous(), slots, turn, values.shape[0], slots.shape[1],
        SLOTS=slots.shape[0], BLOCK=BLOCK, num_warps=1, **pdl(values.device),
    )  # fmt: skip
