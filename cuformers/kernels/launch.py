"""What every Triton launch needs to know about where it runs.

Programmatic dependent launch (PDL, capability 9.0 on): a kernel may start while its predecessor in the stream still
runs. Every kernel of the decode chain therefore (1) calls `gdc_launch_dependents` first, so that its successor can
start early; (2) loads what no kernel of the chain writes: weights, tables, and the step's own lengths, slots, rows
and block tables; (3) calls `gdc_wait`, after which the results of all earlier kernels are visible; (4) reads those,
and stores. The step's tables must be written before the chain's first kernel by something that is no part of the
chain, with an ordinary kernel (such as the embedding's) in between, or by an earlier graph.
"""

from functools import cache
from typing import Any

import torch

from cuformers.base import env
from cuformers.cuda.device import capability, num_sms

DEFAULT_SMS = 132
"""Assumed where there is no GPU to ask (Triton's interpreter)."""


@cache
def use_pdl(device: torch.device) -> bool:
    """Whether kernels on this device are launched with programmatic dependent launch."""
    return (capability(device) or (0, 0)) >= (9, 0) and not interpreted()


def pdl(device: torch.device) -> dict[str, Any]:
    """Launch arguments that switch PDL on where the device has it."""
    return {"PDL": True, "launch_pdl": True} if use_pdl(device) else {"PDL": False}


def sms(device: torch.device) -> int:
    """Multiprocessors of the device; H200's number where there is no GPU."""
    return num_sms(device) or DEFAULT_SMS


@cache
def interpreted() -> bool:
    """Whether kernels run in Triton's CPU interpreter, whose bf16 `tl.dot` is silently wrong: operands go up first."""
    return env.flag("TRITON_INTERPRET")
