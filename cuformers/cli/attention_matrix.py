"""`cuformers env --attention`: what each attention backend can here, and how fast it is on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cuformers.cuda.device import capability
from cuformers.cuda.rates import seconds_a_call
from cuformers.nn.attention.backend import AttentionBackend, AttentionProblem, AttentionSpec
from cuformers.nn.attention.choose import BACKENDS
from cuformers.nn.attention.registered import AttentionInterface, registered
from cuformers.nn.attention.sdpa_rule import SdpaProblem, choose_kernel
from cuformers.nn.step import full_step

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 8, 4096, 16, 8, 128
"""What is measured: causal attention over so many sequences of one length."""
BACKWARD = 2.5
"""Products of the backward pass for each of the forward pass: five for two, the scores computed anew included."""


@dataclass(frozen=True, kw_only=True)
class BackendRow:
    """One backend on this machine."""

    name: str
    usable: bool
    """For plain causal attention with a head_dim of 128, in the dtype that models mostly have here."""
    training: bool
    window: bool
    softcap: bool
    sinks: bool
    head_dim_256: bool
    float32: bool
    forward_tflops: float | None = None
    """Measured on the GPU; None where there is none, or it can't be used."""
    backward_tflops: float | None = None
    remarks: str = ""
    """Why not, in the backend's own words."""


Measure = Callable[[AttentionBackend, torch.device, torch.dtype, bool], float]


def matrix(device: torch.device, dtype: torch.dtype, measure: Measure | None = None) -> list[BackendRow]:
    """A row for each backend.

    Args:
        device: where models run.
        dtype: that they mostly have there.
        measure: gives TFLOP/s, forward or backward; None measures on a GPU and nowhere else.
    """
    if measure is None and device.type == "cuda":
        measure = tflops
    rows = [_row(name, make(), device, dtype, measure) for name, make in BACKENDS.items()]
    own = ((name, registered(name)) for name in AttentionInterface.known)
    return rows + [_row(name, backend, device, dtype, measure) for name, backend in own if backend is not None]


def _row(
    name: str, backend: AttentionBackend, device: torch.device, dtype: torch.dtype, measure: Measure | None
) -> BackendRow:
    plain = AttentionProblem(device=device, dtype=dtype, head_dim=HEAD_DIM, softcap=False, window=False)
    reason = backend.why_not(plain)
    asked = {
        "training": replace(plain, train=True),
        "window": replace(plain, window=True),
        "softcap": replace(plain, softcap=True),
        "sinks": replace(plain, sinks=True),
        "head_dim_256": replace(plain, head_dim=256),
        "float32": replace(plain, dtype=torch.float32),
    }
    if reason is not None:
        return BackendRow(name=name, usable=False, remarks=reason, **dict.fromkeys(asked, False))
    refused = {what: backend.why_not(problem) for what, problem in asked.items()}
    remarks = [f"{what}: {why}" for what, why in refused.items() if why]
    if name == "sdpa":
        choice = choose_kernel(SdpaProblem(capability(device), dtype, HEAD_DIM, LENGTH, False))
        remarks.insert(0, f"{choice.kernel} for the measured shape: {choice.why}")
    speeds: list[float | None] = [None, None]
    for train in (False, True):
        if measure is None or (train and refused["training"]):
            continue
        try:
            speeds[train] = measure(backend, device, dtype, train)
        except (RuntimeError, AssertionError) as failure:  # out of memory, or the compiler's
            remarks.append(f"not measured: {next(iter(str(failure).splitlines()), type(failure).__name__)}")
    can = {what: why is None for what, why in refused.items()}
    return BackendRow(
        name=name, usable=True, remarks="; ".join(remarks), forward_tflops=speeds[0], backward_tflops=speeds[1], **can
    )


def tflops(backend: AttentionBackend, device: torch.device, dtype: torch.dtype, backward: bool) -> float:
    """10^12 floating-point operations a second; what the causal mask hides does not count."""
    spec = AttentionSpec(layer=0, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
    tokens = BATCH * LENGTH
    q, k, v = (
        torch.randn(tokens, heads, HEAD_DIM, device=device, dtype=dtype, requires_grad=backward)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    step = full_step(torch.arange(tokens, device=device), (LENGTH,) * BATCH, backend)
    flops = 2 * BATCH * HEADS * LENGTH**2 * HEAD_DIM
    if not backward:
        with torch.no_grad():
            return flops / seconds_a_call(lambda: backend.forward(q, k, v, spec, step), device) / 1e12
    out = backend.forward(q, k, v, spec, step)
    grad = torch.randn_like(out)
    seconds = seconds_a_call(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device)
    return BACKWARD * flops / seconds / 1e12
