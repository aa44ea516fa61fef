"""Ops `rms_norm`, `add_rms_norm`, `rms_norm_add` (arXiv 1910.07467).

    rms_norm(x [..., H], weight [H], eps, offset=0.0) -> [..., H]
    add_rms_norm(x [..., H], residual [..., H], weight [H], eps, offset=0.0) -> (normed, sum), both [..., H]
    rms_norm_add(x [..., H], residual [..., H], weight [H], eps, offset=0.0) -> [..., H]

x and residual share dtype and shape; the weight may have another float dtype.
"""

from collections.abc import Callable

from cuformers.kernels.op import Implementation, Op


def _op(name: str) -> Op:
    def load_triton() -> Callable:
        from cuformers.kernels.norm import triton

        return getattr(triton, name)

    def load_reference() -> Callable:
        from cuformers.kernels.norm import reference

        return getattr(reference, name)

    triton = Implementation(name="triton", load=load_triton, modes=frozenset({"infer"}), min_capability=(8, 0))
    return Op(name, (triton, Implementation(name="reference", load=load_reference)))


RMS_NORM = _op("rms_norm")
ADD_RMS_NORM = _op("add_rms_norm")
RMS_NORM_ADD = _op("rms_norm_add")
