"""From a chunk of logits to losses, and to the gradient of these logits in their place."""

import triton
import triton.language as tl

from cuformers.kernels.activation_triton import tanh


@triton.jit
def _bent(raw, scale, softcap, SOFTCAP: tl.constexpr):
    """The logits that the softmax sees."""
    z = raw.to(tl.float32) * scale
    if SOFTCAP:
        z = softcap * tanh(z / softcap)
    return z


@triton.jit
def loss_kernel(
    logits_ptr, labels_ptr, nll_ptr, entropy_ptr, by_nll_ptr, by_entropy_ptr,
    V, stride, ignore_index, scale, softcap,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    """Grid [rows]; rows of logits lie `stride` apart. Stores nll, and with ENTROPY the entropy.

    GRAD: the logits are overwritten by their gradient, given the row's gradient of nll, and with ENTROPY of entropy.
    """
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    label = tl.load(labels_ptr + row)
    col = tl.arange(0, BLOCK)
    if label == ignore_index:
        tl.store(nll_ptr + row, 0.0)
        if ENTROPY:
            tl.store(entropy_ptr + row, 0.0)
        if GRAD:
            nothing = tl.zeros((BLOCK,), dtype=logits_ptr.dtype.element_ty)
            for start in range(0, V, BLOCK):
                tl.store(logits_ptr + start + col, nothing, mask=start + col < V)
        return
    real = (label >= 0) & (label < V)
    # The greatest logit so far begins as the label's, so that no difference below is infinite.
    chosen = _bent(tl.load(logits_ptr + label, mask=real, other=0.0), scale, softcap, SOFTCAP)
    top, mass, moment = chosen, 0.0, 0.0
    for start in range(0, V, BLOCK):
        inside = start + col < V
        z = _bent(tl.load(logits_ptr + start + col, mask=inside, other=0.0), scale, softcap, SOFTCAP)
        new = tl.maximum(top, tl.max(tl.where(inside, z, top), axis=0))
        shrink = tl.exp(top - new)
        share = tl.where(inside, tl.exp(z - new), 0.0)
        if ENTROPY:
            moment = shrink * (moment + (top - new) * mass) + tl.sum(share * (z - new), axis=0)
        mass = shrink * mass + tl.sum(share, axis=0)
        top = new
    log_mass = tl.log(mass)
    entropy = log_mass - moment / mass
    nan = float("nan")
    tl.store(nll_ptr + row, tl.where(real, top + log_mass - chosen, nan))
    if ENTROPY:
        tl.store(entropy_ptr + row, tl.where(real, entropy, nan))
    if GRAD:
        by_nll = tl.where(real, tl.load(by_nll_ptr + row), nan)
        by_entropy = 0.0
        if ENTROPY:
            by_entropy = tl.load(by_entropy_ptr + row)
        for start in range(0, V, BLOCK):
            at = start + col
            z = _bent(tl.load(logits_ptr + at, mask=at < V, other=0.0), scale, softcap, SOFTCAP)
            log_p = z - top - log_mass
            p = tl.exp(log_p)
            grad = by_nll * (p - tl.where(at == label, 1.0, 0.0))
            if ENTROPY:
                grad -= by_entropy * p * (log_p + entropy)
            if SOFTCAP:
                grad *= 1.0 - (z / softcap) * (z / softcap)
            tl.store(logits_ptr + at, (grad * scale).to(logits_ptr.dtype.element_ty), mask=at < V)
