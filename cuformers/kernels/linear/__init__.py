"""Op `linear`: y = (norm(x) @ weight.T + bias) * scale + residual.

    linear(x [T, K], weight [N, K], bias [N] | None, *, norm=None, residual [T, N] | None, scale=1.0, overwrite=False)
        -> [T, N]

All tensors share one dtype (the norm's weight may have another). Products accumulate in float32. The normed x is
rounded to the dtype before the product, as an unfused norm would be. A row of the result depends on its own row of x
and on the number of rows, never on the other rows' values. No argument is overwritten, but the residual may be, its
memory becoming the result's, where the caller says `overwrite`: it is nobody else's then.
"""

from cuformers.kernels.linear.config import MAX_ROWS
from cuformers.kernels.op import two_ways


def rides(rows: int) -> bool:
    """Whether a norm before and a residual after cost nothing, as they ride in the kernel for so few rows."""
    return rows <= MAX_ROWS


OP = two_ways(__name__, "linear")
