"""Op `ssd_scan`: Mamba-2's recurrence (state space duality, arXiv 2405.21060), every head with a matrix as its state.

    ssd_scan(x [T, H, P], dt [T, H], A [H] float32, B [T, G, S], C [T, G, S], cu_seqlens [N + 1] int32, *,
             D=None [H], z=None [T, H, P], dt_bias=None [H], dt_limit=(0.0, inf), initial=None [N, H, P, S] float32,
             keep=False) -> Scanned

Over the tokens t of a sequence, for head h of group g = h // (H / G), with s = softplus(dt[t] + dt_bias) held within
dt_limit, and A below 0:

    h = exp(s * A) * h + s * x[t] (outer product) B[t, g];    y[t] = (h C[t, g] + D * x[t]) * silu(z[t])

Sequence n of the flat stream is [cu_seqlens[n], cu_seqlens[n + 1]); the last one ends at T, and any may be empty. Its
first state is `initial[n]`, or zeros. The reference computes in float32 and rounds once; for what the kernel rounds
before its products see docs/precision.md. The rows of x, dt, B, C and z may lie apart.
"""

from cuformers.kernels.op import two_ways

OP = two_ways(__name__, "ssd_scan")
