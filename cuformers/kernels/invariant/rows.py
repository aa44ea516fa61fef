"""Ops whose kernels give a row the same bits whatever the number of rows, as they stand; here they get gradients."""

from typing import Any

from torch import Tensor

from cuformers.kernels.gated_linear import reference as gated_reference
from cuformers.kernels.gated_linear import triton as gated_triton
from cuformers.kernels.logprobs import Logprobs
from cuformers.kernels.logprobs import reference as logprobs_reference
from cuformers.kernels.logprobs import triton as logprobs_triton
from cuformers.kernels.norm import reference as norm_reference
from cuformers.kernels.norm import triton as norm_triton
from cuformers.kernels.recompute import with_gradient

rms_norm = with_gradient(norm_triton.rms_norm, norm_reference.rms_norm)
add_rms_norm = with_gradient(norm_triton.add_rms_norm, norm_reference.add_rms_norm)
rms_norm_add = with_gradient(norm_triton.rms_norm_add, norm_reference.rms_norm_add)
gated_activation = with_gradient(gated_triton.gated_activation, gated_reference.gated_activation)
_logprobs: Any = with_gradient(logprobs_triton.logprobs, logprobs_reference.logprobs)


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """See the op's package."""
    return Logprobs(*_logprobs(logits, tokens, top))
