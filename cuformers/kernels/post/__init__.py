"""Op `post`: what a step says to the host, written where the host reads it.

    post(values [N] int64, slots [S, W] int64 on the host, turn [1] int64) -> None, in place

The values go to `slots[turn % S, :N]`, then turn counts on. On a GPU `slots` is page-locked, and the kernel writes
straight to it: a captured step needs no copy behind its back, whose start and end cost more than the kernel. The values
are there once an event recorded behind the kernel is past; a slot keeps them until S - 1 more posts were launched.
"""

from cuformers.kernels.op import two_ways

OP = two_ways(__name__, "post")
