"""Ops whose kernels give a row the same bits whatever the number of rows, as they stand; here they get gradients.

`penalize` is one of them and needs none. `sample` is one of them for logits of one dtype: see there.
"""

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
from cuformers.kernels.sample import triton as sample_triton

rms_norm = with_gradient(norm_triton.rms_norm, norm_reference.rms_norm)
add_rms_norm = with_gradient(norm_triton.add_rms_norm, norm_reference.add_rms_norm)
rms_norm_add = with_gradient(norm_triton.rms_norm_add, norm_reference.rms_norm_add)
gated_activation = with_gradient(gated_triton.gated_activation, gated_reference.gated_activation)
_logprobs: Any = with_gradient(logprobs_triton.logprobs, logprobs_reference.logprobs)


def sample(logits: Tensor, *ways: Tensor) -> Tensor:
    """See the op's package. Always from float32, as a row is that has penalties or processors, or is beside one that
    has: the sampler adds up the mass of top_p in an order that depends on the dtype."""
    return sample_triton.sample(logits.float(), *ways)


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """See the op's package."""
    return Logprobs(*_logprobs(logits, tokens, top))
