"""All ops, and the functions that one model uses for them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from cuformers.base.errors import bad_argument
from cuformers.kernels import invariant
from cuformers.kernels.advance import OP as ADVANCE
from cuformers.kernels.attention_plan import OP as ATTENTION_PLAN
from cuformers.kernels.attention_plan import AttentionPlan
from cuformers.kernels.causal_conv1d import OP as CAUSAL_CONV1D
from cuformers.kernels.causal_conv1d import Convolved
from cuformers.kernels.chunk_attention import OP as CHUNK_ATTENTION
from cuformers.kernels.decode_attention import OP as DECODE_ATTENTION
from cuformers.kernels.experts import OP as EXPERTS
from cuformers.kernels.gated_linear import GATED_ACTIVATION, GATED_LINEAR
from cuformers.kernels.invariant_linear import INVARIANT_GATED_LINEAR, INVARIANT_LINEAR
from cuformers.kernels.layer_norm import ADD_LAYER_NORM, LAYER_NORM
from cuformers.kernels.linear import OP as LINEAR
from cuformers.kernels.linear_cross_entropy import OP as LINEAR_CROSS_ENTROPY
from cuformers.kernels.linear_cross_entropy import TokenLosses
from cuformers.kernels.logprobs import OP as LOGPROBS
from cuformers.kernels.logprobs import Logprobs
from cuformers.kernels.moe_route import OP as MOE_ROUTE
from cuformers.kernels.moe_route import Routes
from cuformers.kernels.norm import ADD_RMS_NORM, RMS_NORM, RMS_NORM_ADD
from cuformers.kernels.op import Choice, Op, Problem
from cuformers.kernels.paged_attention import OP as PAGED_ATTENTION
from cuformers.kernels.penalize import OP as PENALIZE
from cuformers.kernels.post import OP as POST
from cuformers.kernels.prepare import OP as PREPARE
from cuformers.kernels.prepare import StepInput
from cuformers.kernels.rope_cache import OP as ROPE_CACHE
from cuformers.kernels.sample import ARGMAX, SAMPLE
from cuformers.kernels.selective_scan import OP as SELECTIVE_SCAN
from cuformers.kernels.selective_scan import Scanned
from cuformers.kernels.speculate import ACCEPT, DRAFT_LOOKUP, SPREAD_DRAFTS, DraftRows
from cuformers.kernels.ssd_scan import OP as SSD_SCAN

OPS: tuple[Op, ...] = (
    RMS_NORM,
    ADD_RMS_NORM,
    RMS_NORM_ADD,
    LAYER_NORM,
    ADD_LAYER_NORM,
    LINEAR,
    GATED_LINEAR,
    GATED_ACTIVATION,
    INVARIANT_LINEAR,
    INVARIANT_GATED_LINEAR,
    MOE_ROUTE,
    EXPERTS,
    ROPE_CACHE,
    ATTENTION_PLAN,
    PAGED_ATTENTION,
    DECODE_ATTENTION,
    CHUNK_ATTENTION,
    CAUSAL_CONV1D,
    SELECTIVE_SCAN,
    SSD_SCAN,
    SAMPLE,
    ARGMAX,
    LOGPROBS,
    LINEAR_CROSS_ENTROPY,
    PENALIZE,
    ADVANCE,
    POST,
    PREPARE,
    DRAFT_LOOKUP,
    SPREAD_DRAFTS,
    ACCEPT,
)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One function per op; shapes and meaning are in the docstring of each op's folder."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rms_norm_add: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    linear: Callable[..., Tensor]
    gated_linear: Callable[..., Tensor]
    gated_activation: Callable[..., Tensor]
    invariant_linear: Callable[..., Tensor]
    invariant_gated_linear: Callable[..., Tensor]
    moe_route: Callable[..., Routes]
    experts: Callable[..., Tensor]
    rope_cache: Callable[..., tuple[Tensor, Tensor, Tensor]]
    attention_plan: Callable[..., AttentionPlan]
    paged_attention: Callable[..., Tensor]
    decode_attention: Callable[..., Tensor]
    chunk_attention: Callable[..., Tensor]
    causal_conv1d: Callable[..., Convolved]
    selective_scan: Callable[..., Scanned]
    ssd_scan: Callable[..., Scanned]
    sample: Callable[..., Tensor]
    argmax: Callable[..., Tensor]
    logprobs: Callable[..., Logprobs]
    linear_cross_entropy: Callable[..., TokenLosses]
    penalize: Callable[..., Tensor]
    advance: Callable[..., None]
    post: Callable[..., None]
    prepare: Callable[..., StepInput]
    draft_lookup: Callable[..., Tensor]
    spread_drafts: Callable[..., DraftRows]
    accept: Callable[..., Tensor]
    choices: tuple[Choice, ...]
    """Which implementation each op got, and why the others did not."""
    deterministic: bool = False
    """Whether a row's bits depend on nothing but the row and the weights: see `cuformers.kernels.invariant`."""

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can hold them."""
        return all(choice.implementation.captures for choice in self.choices)


@cache
def select(problem: Problem, want: str = "auto", *, deterministic: bool = False) -> Kernels:
    """The best functions for the problem.

    The same problem gets the same object, so that a model knows when its kernels have changed. A function without a
    train mode never swallows a gradient: see `guard`.

    Args:
        problem: device, dtype and mode of the model.
        want: "auto", or the name of the implementation that every op must use.
        deterministic: take the batch-invariant functions, which are the same in both modes.

    Raises:
        ValueError: the wanted implementation is unknown or can't serve the problem.
    """
    if deterministic:
        _check_deterministic(problem, want)
    choices = tuple(invariant.choose(op, problem) if deterministic else op.choose(problem, want) for op in OPS)
    functions = {choice.op: choice.function for choice in choices}
    return Kernels(**functions, choices=choices, deterministic=deterministic)


def _check_deterministic(problem: Problem, want: str) -> None:
    remedy = "Put the model on an NVIDIA GPU of capability 8.0 or newer, in bfloat16, float16 or float32."
    reason = invariant.why_not(problem)
    if reason is not None:
        raise bad_argument("deterministic", True, f"False here ({reason})", remedy)
    if want not in ("auto", "triton"):
        raise bad_argument("kernels", want, "'auto' or 'triton' with deterministic=True")


@cache
def reference() -> Kernels:
    """Plain PyTorch for every op: right everywhere, in both modes."""
    return select(Problem(device="cpu", mode="train"), "reference")
