"""Ops `rms_norm`, `add_rms_norm`, `rms_norm_add` (arXiv 1910.07467).

    rms_norm(x [..., H], weight [H], eps, offset=0.0) -> [..., H]
    add_rms_norm(x [..., H], residual [..., H], weight [H], eps, offset=0.0) -> (normed, sum), both [..., H]
    rms_norm_add(x [..., H], residual [..., H], weight [H], eps, offset=0.0) -> [..., H]

x and residual share dtype and shape; the weight may have another float dtype.
"""

from cuformers.kernels.op import two_ways

RMS_NORM = two_ways(__name__, "rms_norm")
ADD_RMS_NORM = two_ways(__name__, "add_rms_norm")
RMS_NORM_ADD = two_ways(__name__, "rms_norm_add")
