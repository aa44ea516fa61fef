"""Every Triton kernel compiles for every generation of GPU from 8.0 on, without a GPU; from 9.0 on also with PDL.

What ptxas says is checked where it decides the speed: nothing spills, and weights are loaded before the wait.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import pytest

triton = pytest.importorskip("triton")

CAPABILITIES = (80, 90, 100, 120)
SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on the smallest of these cards (8.6, 8.9, 12.0)."""
TYPES = {
    "bf16": "x w w2 bias norm residual y weight sum qkv q_norm k_norm k_cache v_cache q k v sinks out logits",
    "fp32": "cos sin part stats temperature top_p min_p candidates tops lows sums scales collected thresholds values",
    "i64": "seeds positions bin_masses picked ids",
    "i32": "rows slots tables bounds lengths items splits top_k counts cuts flat bin_counts tokens",
}
POINTERS = {f"{name}_ptr": f"*{dtype}" for dtype, names in TYPES.items() for name in names.split()}
POINTERS |= dict.fromkeys(("sampled", "tokens", "eos", "values", "box", "turn"), "*i64")
POINTERS |= dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), "*fp32")
POINTERS |= {"above_ptr": "*i32", "ranks_ptr": "*i32", "bests_ptr": "*fp32", "chosen_ptr": "*fp32"}
POINTERS |= {f"{name}_ptr": "*i32" for name in ("history", "prompts", "least")}
POINTERS |= {f"{name}_ptr": "*fp32" for name in ("repetition", "frequency", "presence", "bias", "scores")}
POINTERS |= {f"{name}_ptr": "*bf16" for name in ("h", "opened", "grad", "weighted", "a", "b")}
POINTERS |= {f"{name}_ptr": "*i32" for name in ("before", "tiles", "order", "places")}
POINTERS |= {f"{name}_ptr": "*fp32" for name in ("weights", "weight_grad")}
POINTERS |= {"eos_ptr": "*i64", "bias_ids_ptr": "*i64"}
POINTERS |= {f"{name}_ptr": "*bf16" for name in ("carried", "c", "dt", "skip", "z", "dt_bias")}
POINTERS |= {f"{name}_ptr": "*fp32" for name in ("rate", "state", "final")}
STATE = "rows positions lengths slots limits block_tables history"
PLAN = "bounds starts reached final out_positions out_reached out_slots out_lengths out_last out_rows"
POINTERS |= dict.fromkeys(f"{STATE} {PLAN}".split(), "*i32") | {"out_tokens": "*i64"}
POINTERS |= dict.fromkeys(("drafts", "emitted", "matches"), "*i64") | {"out_tables": "*i32"}
FLOATS = ("eps", "offset", "scale", "eps_q", "eps_k", "offset_q", "offset_k", "softcap", "low", "high")
POINTERS |= {"labels_ptr": "*i64"} | {f"{name}_ptr": "*fp32" for name in ("nll", "entropy", "by_nll", "by_entropy")}
ORDINARY = {
    "attention_plan.triton.plan_kernel",
    "causal_conv1d.triton.conv_kernel",
    "selective_scan.triton.selective_scan_kernel",
    "ssd_scan.triton.ssd_scan_kernel",
    "experts.gradient_kernel.gate_kernel",
    "experts.gradient_kernel.gate_gradient_kernel",
    "experts.gradient_kernel.row_sum_kernel",
    "experts.gradient_kernel.weight_gradient_kernel",
    "linear_cross_entropy.kernel.loss_kernel",
}
"""Kernels that are no part of a chain: launched without PDL."""


@dataclass(frozen=True)
class Build:
    """A kernel by module and name, with its constants."""

    kernel: str
    constants: dict[str, Any]
    num_warps: int = 4

    @property
    def fp8(self) -> bool:
        """Whether it reads or writes an fp8 cache, for which GPUs have instructions from 8.9 on."""
        return bool(self.constants.get("SCALED")) or self.kernel.endswith("fp8_attention_kernel")

    def __str__(self) -> str:
        return self.kernel.rsplit(".", 1)[1] + "-" + "-".join(str(v) for v in self.constants.values())


FMA = {"BLOCK_N": 4, "BLOCK_K": 1024, "CHUNKS": 1, "COPIES": 1, "K": 1024, "BIAS": False}
MMA = {"K": 1024, "WARPS": 4, "AHEAD": 2, "BIAS": True}
ATTENTION = {"HKV": 8, "D": 128, "BLOCK_D": 128, "BLOCK_M": 16, "BLOCK_S": 64, "STAGES": 3, "UPCAST": False}
FP8 = {"HKV": 8, "D": 64, "BLOCK_D": 64, "PAGE": 64, "BLOCK_M": 16, "BLOCK_S": 64, "STAGES": 3, "EMULATED": False} | {
    "SOFTCAP": False,
    "SINKS": False,
}
CHUNK = {"HKV": 8, "D": 128, "BLOCK_D": 128, "BLOCK_M": 128, "BLOCK_S": 64, "STAGES": 3, "UPCAST": False} | {
    "SCALED": False
}
PLAN_SIZES = {"BLOCK": 64, "BLOCK_N": 256, "BLOCK_I": 64}
PRODUCT = {"BLOCK_K": 64, "GROUP": 8, "TMA": True, "UPCAST": False, "BIAS": True, "RESIDUAL": False} | {
    "SPLITS": 1,
    "PARTIAL": False,
    "ACTIVATION": "none",
    "AHEAD": 0,
}
SPLIT = {"SPLITS": 38, "CANDIDATES": 64, "SHIFT": 16}
LOGPROBS = {"GROUPS": 4748, "GROUP": 32}
LIKELIEST = LOGPROBS | {"SPLITS": 38, "SPLITS_BLOCK": 64, "FAMILY_BITS": 8}
SORT = {"CHUNK": 64, "STEP": 32, "BLOCK_E": 128}
GROUPED = {"N": 768, "K": 2048, "ACTIVATION": "none", "INTERLEAVED": False, "BIAS": False} | {
    "STAGES": 3,
    "UPCAST": False,
}
GATED_UP = {"TOP_K": 8, "TRANSPOSED": False, "ACTIVATION": "silu"}
GATE = {"BLOCK": 1024, "INTERLEAVED": False}
CLAMPED = {"TOP_K": 4, "TRANSPOSED": True, "ACTIVATION": "clamped_swiglu", "INTERLEAVED": True, "BIAS": True}
FMA_CUT = {"BLOCK_N": 2, "BLOCK_K": 1024, "COPIES": 1}
DRAFTS = {"K": 4, "BLOCK_K": 8}
RIDING = {"SKIP": True, "GATE": True, "BIAS": True, "STATE": True, "KEEP": True}
ALONE = dict.fromkeys(RIDING, False)
SSD = {"H": 80, "SHARED": 80, "P": 64, "S": 128, "CHUNK": 64, "BLOCK_P": 64, "BLOCK_S": 128, "STAGES": 1} | {
    "UPCAST": False
}
BUILDS = [
    Build("norm.triton._norm_kernel", {"H": 1000, "BLOCK": 1024, "ADD": "before"}),
    Build(
        "layer_norm.triton._layer_norm_kernel",
        {"H": 384, "BLOCK": 512, "ROWS": 8, "TURNS": 4, "BIAS": True, "ADD": True, "KEEP": False},
        8,
    ),
    Build(
        "layer_norm.triton._layer_norm_kernel",
        {"H": 4096, "BLOCK": 4096, "ROWS": 1, "TURNS": 4, "BIAS": False, "ADD": True, "KEEP": True},
        8,
    ),
    Build("gated_linear.triton._gate_kernel", {"BLOCK": 1024, "ACTIVATION": "gelu"}),
    Build("linear.fma_kernel.fma_kernel", FMA | {"T": 1, "NORM": True, "RESIDUAL": False, "ACTIVATION": "none"}),
    Build("linear.fma_kernel.fma_kernel", FMA | {"T": 2, "NORM": True, "RESIDUAL": True, "ACTIVATION": "silu"}),
    Build("linear.mma_kernel.mma_kernel", MMA | {"BLOCK_T": 8, "RESIDUAL": True, "ACTIVATION": "none"}),
    Build("linear.mma_kernel.mma_kernel", MMA | {"BLOCK_T": 16, "RESIDUAL": False, "ACTIVATION": "gelu_tanh"}),
    Build(
        "invariant_linear.kernel.product_kernel",
        PRODUCT | {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_N2": 1, "SPLITS": 2},
    ),
    Build(
        "invariant_linear.kernel.product_kernel",
        PRODUCT | {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_N2": 64, "ACTIVATION": "silu", "TMA": False},
    ),
    Build(
        "invariant_linear.kernel.product_kernel",
        PRODUCT | {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_N2": 32, "ACTIVATION": "silu", "AHEAD": 512},
    ),
    Build("invariant_linear.kernel.sum_kernel", {"SPLITS": 2, "BLOCK": 1024, "BIAS": True, "RESIDUAL": True}),
    Build(
        "rope_cache.triton._rope_cache_kernel",
        {"D": 80, "HALF": 16, "BLOCK_HALF": 16, "BLOCK_REST": 64, "PAGE": 16, "HEADS": 8, "NORM": "qk", "ROTATE": True}
        | {"CACHE": True, "SCALED": False, "EMULATED": False},
    ),
    Build(
        "rope_cache.triton._rope_cache_kernel",
        {"D": 128, "HALF": 64, "BLOCK_HALF": 64, "BLOCK_REST": 1, "PAGE": 64, "HEADS": 1, "NORM": "none"}
        | {"ROTATE": True, "CACHE": True, "SCALED": True, "EMULATED": False},
        1,
    ),
    Build("attention_plan.triton.plan_kernel", PLAN_SIZES | {"WINDOW": True}, 1),
    Build(
        "paged_attention.kernel.attention_kernel",
        ATTENTION | {"G": 2, "PAGE": 64, "EARLY": True, "SOFTCAP": False, "SINKS": False},
    ),
    Build(
        "paged_attention.kernel.attention_kernel",
        ATTENTION | {"G": 4, "PAGE": 64, "EARLY": False, "SOFTCAP": False, "SINKS": False},
    ),
    Build(
        "paged_attention.kernel.attention_kernel",
        ATTENTION | {"G": 4, "PAGE": 16, "EARLY": True, "SOFTCAP": True, "SINKS": True},
    ),
    Build("paged_attention.fp8_kernel.fp8_attention_kernel", FP8 | {"G": 2, "EARLY": True}),
    Build("paged_attention.fp8_kernel.fp8_attention_kernel", FP8 | {"G": 4, "EARLY": False}, 2),
    Build(
        "paged_attention.fp8_kernel.fp8_attention_kernel",
        FP8 | {"G": 4, "PAGE": 16, "EARLY": True, "SOFTCAP": True, "SINKS": True},
    ),
    Build(
        "paged_attention.merge_kernel.merge_kernel",
        {"HQ": 16, "D": 80, "BLOCK_D": 128, "BLOCK_P": 32, "SINKS": True},
    ),
    Build(
        "chunk_attention.kernel.chunk_kernel",
        CHUNK | {"G": 2, "PAGE": 64, "WINDOW": False, "SOFTCAP": False, "SINKS": False},
        8,
    ),
    Build(
        "chunk_attention.kernel.chunk_kernel",
        CHUNK | {"G": 2, "PAGE": 64, "WINDOW": False, "SOFTCAP": False, "SINKS": False, "SCALED": True},
        8,
    ),
    Build(
        "chunk_attention.kernel.chunk_kernel",
        CHUNK | {"G": 3, "PAGE": 16, "WINDOW": True, "SOFTCAP": True, "SINKS": True, "SCALED": True},
        8,
    ),
    Build(
        "chunk_attention.kernel.chunk_kernel",
        CHUNK | {"G": 3, "PAGE": 16, "WINDOW": True, "SOFTCAP": True, "SINKS": True},
        8,
    ),
    Build(
        "chunk_attention.kernel.chunk_kernel",
        CHUNK
        | {"D": 256, "BLOCK_D": 256, "BLOCK_M": 64, "BLOCK_S": 32, "G": 2, "PAGE": 64}
        | {"WINDOW": True, "SOFTCAP": False, "SINKS": False},
        8,
    ),
    Build("sample.threshold_kernel.split_kernel", SPLIT | {"BLOCK": 4096, "STRIPE": 32}, 8),
    Build("sample.threshold_kernel.row_kernel", SPLIT | {"SPLITS_BLOCK": 64, "BINS": 2048}, 8),
    Build("sample.flat_kernel.histogram_kernel", {"BINS": 2048, "BLOCK": 4096}, 8),
    Build("sample.flat_kernel.collect_kernel", {"BINS": 2048, "BLOCK": 4096, "ROOM": 4096, "SHIFT": 16}, 8),
    Build("sample.draw_kernel.draw_kernel", {"BLOCK": 2048, "GREEDY": False}),
    Build("sample.draw_kernel.pick_kernel", {"BLOCK": 128}, 1),
    Build("penalize.kernel.score_kernel", {"BLOCK": 4096, "SPAN": 256, "EOS_BLOCK": 4, "BIAS_BLOCK": 512}),
    Build("penalize.kernel.penalty_kernel", {"SPAN": 256}),
    Build("logprobs.kernel.split_kernel", LOGPROBS | {"BLOCK": 4096, "TOP": 20}),
    Build("logprobs.kernel.row_kernel", LIKELIEST | {"TOP": 20, "TOP_BLOCK": 32, "BITS": 10, "SHIFT": 16}, 8),
    Build("logprobs.kernel.row_kernel", LIKELIEST | {"TOP": 5, "TOP_BLOCK": 8, "BITS": 8, "SHIFT": 0}, 8),
    Build(
        "linear_cross_entropy.kernel.loss_kernel",
        {"BLOCK": 8192, "SOFTCAP": False, "ENTROPY": False, "GRAD": True},
        16,
    ),
    Build(
        "linear_cross_entropy.kernel.loss_kernel", {"BLOCK": 8192, "SOFTCAP": True, "ENTROPY": True, "GRAD": True}, 16
    ),
    Build(
        "linear_cross_entropy.kernel.loss_kernel", {"BLOCK": 8192, "SOFTCAP": False, "ENTROPY": True, "GRAD": False}, 16
    ),
    Build("advance.triton.advance_kernel", {"PAGE": 64, "EOS_BLOCK": 4, "ROWS": False, "GROUPS": 1}, 1),
    Build("advance.triton.advance_kernel", {"PAGE": 64, "EOS_BLOCK": 4, "ROWS": True, "GROUPS": 2}, 1),
    Build("post.triton.post_kernel", {"SLOTS": 8, "BLOCK": 256}, 1),
    Build("speculate.lookup_kernel.search_kernel", DRAFTS | {"LONGEST": 3, "SHARES": 1, "BLOCK": 4096}, 8),
    Build("speculate.lookup_kernel.search_kernel", DRAFTS | {"LONGEST": 3, "SHARES": 13, "BLOCK": 4096}, 8),
    Build("speculate.lookup_kernel.follow_kernel", DRAFTS | {"SHARES": 13, "BLOCK_SHARES": 16}, 1),
    Build("speculate.spread_kernel.spread_kernel", DRAFTS | {"PAGE": 64, "GROUPS": 2, "BLOCK": 1024}),
    Build("speculate.accept_kernel.accept_kernel", DRAFTS | {"PAGE": 64, "GROUPS": 2, "EOS_BLOCK": 4}, 1),
    Build("moe_route.triton.route_kernel", {"TOP_K": 8, "BLOCK_E": 128, "BLOCK_K": 8, "NORMALISE": True}, 1),
    Build("experts.order_kernel.rank_kernel", {"BLOCK_M": 16, "BLOCK_E": 128, "SPAN": 32, "WIDE": 128}, 8),
    Build("experts.order_kernel.count_kernel", SORT),
    Build("experts.order_kernel.tile_kernel", {"BLOCK_M": 16, "BLOCK_E": 128, "SPAN": 32}, 8),
    Build("experts.order_kernel.place_kernel", SORT),
    Build("experts.grouped_kernel.grouped_kernel", GROUPED | {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128} | GATED_UP),
    Build("experts.grouped_kernel.grouped_kernel", GROUPED | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64} | GATED_UP),
    Build(
        "experts.grouped_kernel.grouped_kernel",
        GROUPED | {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "TOP_K": 0, "TRANSPOSED": False, "STAGES": 2},
        8,
    ),
    Build(
        "experts.grouped_kernel.grouped_kernel",
        GROUPED | {"N": 100, "K": 50, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "TOP_K": 2, "TRANSPOSED": True},
    ),
    Build("experts.grouped_kernel.grouped_kernel", GROUPED | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64} | CLAMPED),
    Build(
        "experts.grouped_kernel.grouped_kernel",
        GROUPED | {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "BIAS": True} | GATED_UP,
    ),
    Build(
        "experts.grouped_kernel.combine_kernel", {"TOP_K": 8, "BLOCK": 512, "WEIGHTED": True, "RESIDUAL": True}
    ),
    Build("experts.few_kernel.up_kernel", FMA_CUT | {"K": 2048, "CHUNKS": 2, "TOP_K": 8, "ACTIVATION": "silu"}),
    Build(
        "experts.few_kernel.down_kernel",
        {"K": 768, "BLOCK_N": 4, "BLOCK_K": 256, "CHUNKS": 3, "COPIES": 4, "TOP_K": 8, "AT_ONCE": 5, "RESIDUAL": True},
    ),
    Build("experts.gradient_kernel.gate_kernel", GATE | {"ACTIVATION": "silu"}),
    Build("experts.gradient_kernel.gate_gradient_kernel", GATE | {"ACTIVATION": "gelu_tanh"}),
    Build("experts.gradient_kernel.gate_gradient_kernel", GATE | {"ACTIVATION": "clamped_swiglu", "INTERLEAVED": True}),
    Build("experts.gradient_kernel.row_sum_kernel", {"TOP_K": 4, "WEIGHTED": True, "ROWS": 32, "BLOCK": 128}),
    Build(
        "experts.gradient_kernel.weight_gradient_kernel",
        {"M": 2048, "N": 768, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "TOP_K_A": 8, "TOP_K_B": 0}
        | {"STAGES": 2, "UPCAST": False},
        8,
    ),
    Build(
        "causal_conv1d.triton.conv_kernel",
        {"K": 4, "STEPS": 4, "BLOCK_T": 32, "BLOCK_C": 128, "BIAS": True, "CARRIED": True, "SILU": True},
    ),
    Build(
        "causal_conv1d.triton.conv_kernel",
        {"K": 3, "STEPS": 1, "BLOCK_T": 32, "BLOCK_C": 128, "BIAS": False, "CARRIED": False, "SILU": False},
    ),
    Build(
        "selective_scan.triton.selective_scan_kernel",
        {"S": 16, "BLOCK_S": 16, "BLOCK_C": 32, "AT_ONCE": 4} | RIDING,
        1,
    ),
    Build(
        "selective_scan.triton.selective_scan_kernel", {"S": 7, "BLOCK_S": 8, "BLOCK_C": 32, "AT_ONCE": 4} | ALONE, 1
    ),
    Build("ssd_scan.triton.ssd_scan_kernel", SSD | RIDING, 8),
    Build("ssd_scan.triton.ssd_scan_kernel", SSD | {"CHUNK": 32} | ALONE, 8),
    Build("ssd_scan.triton.ssd_scan_kernel", SSD | {"P": 20, "BLOCK_P": 32, "S": 24, "BLOCK_S": 32} | ALONE, 8),
    Build("prepare.triton.prepare_kernel", {"PAGE": 64, "BLOCK": 128, "STEPS": 6, "GROUPS": 2}),
]


def compiled(build: Build, capability: int) -> tuple[str, str]:
    """(PTX, what ptxas says) with PDL from 9.0 on."""
    from importlib import import_module

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    module, name = build.kernel.rsplit(".", 1)
    kernel = getattr(import_module(f"cuformers.kernels.{module}"), name)
    pdl = capability >= 90 and build.kernel not in ORDINARY
    constants = build.constants | ({} if build.kernel in ORDINARY else {"PDL": pdl})
    signature = {
        n: "constexpr" if n in constants else POINTERS.get(n, "fp32" if n in FLOATS else "i32")
        for n in kernel.arg_names
    }
    if constants.get("TMA"):
        for operand, block in (("x", "BLOCK_M"), ("w", "BLOCK_N"), ("w2", "BLOCK_N")):
            signature[f"{operand}_ptr"] = f"tensordesc<bf16[{constants[block]},{constants['BLOCK_K']}]>"
    if build.kernel.startswith("experts."):
        signature |= {n: t for n, t in (("ids_ptr", "*i32"), ("bias_ptr", "*bf16")) if n in signature}
    if name == "route_kernel":
        signature["ids_ptr"] = "*i32"
    if constants.get("SCALED"):
        signature |= {n: "*fp8e4nv" for n in ("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr") if n in signature}
    if name == "fp8_attention_kernel":
        signature |= {"k_ptr": "*i16", "v_ptr": "*i16"}
    if name == "pick_kernel":
        signature["out_ptr"] = "*i64"
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t[0] == "*" or t == "i32"}
    options = {"num_warps": build.num_warps, "num_stages": 1, "launch_pdl": pdl}
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source(kernel, signature, constants, aligned), target=target, options=options)
    assert made.asm["cubin"]
    return made.asm["ptx"], str(made.metadata.shared)


def _worker(job: tuple[Build, int]) -> tuple[str, str]:
    return compiled(*job)


@pytest.fixture(scope="module")
def results() -> Iterator[dict[tuple[str, int], Any]]:
    """All builds, made by two processes."""
    jobs = [(build, capability) for capability in CAPABILITIES for build in BUILDS if capability > 80 or not build.fp8]
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        futures = {(str(build), capability): pool.submit(_worker, (build, capability)) for build, capability in jobs}
        yield futures


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_compiles(build: Build, capability: int, results: dict[tuple[str, int], Any]) -> None:
    if build.fp8 and capability == 80:
        with pytest.raises(Exception, match=r"fp8e4nv not supported|ptxas"):
            compiled(build, capability)
        return
    ptx, shared = results[str(build), capability].result()
    assert int(shared) <= SHARED
    waits = ptx.count("griddepcontrol.wait")
    chained = capability >= 90 and build.kernel not in ORDINARY
    assert waits == ptx.count("griddepcontrol.launch_dependents") == int(chained)


def test_fp8_pages_are_moved_in_pairs_and_converted_in_one_instruction(results: dict[tuple[str, int], Any]) -> None:
    """To bfloat16 it would be three, one of them at a quarter of the rate; and V would be read byte by byte."""
    for build in BUILDS:
        if build.kernel.endswith("fp8_attention_kernel"):
            ptx, _ = results[str(build), 90].result()
            assert "cvt.rn.f16x2.e4m3x2" in ptx and "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx
            assert "ld.shared.b8" not in ptx and "ld.shared.u8" not in ptx and "bf16.f16" not in ptx


@pytest.mark.parametrize("kernel", ["fma_kernel", "mma_kernel", "attention_kernel"])
def test_weights_and_old_keys_are_asked_for_before_the_wait(kernel: str, results: dict[tuple[str, int], Any]) -> None:
    for build in BUILDS:
        if build.kernel.endswith(kernel) and build.constants.get("EARLY", True):
            ptx, _ = results[str(build), 90].result()
            before, after = ptx.split("griddepcontrol.wait")
            assert before.count("ld.global") >= 4 and "st.global" not in before
            assert "v4.b32" in before and "st.global" in after


def test_weights_go_straight_to_the_registers_of_the_tensor_cores(results: dict[tuple[str, int], Any]) -> None:
    for build in BUILDS:
        if build.kernel.endswith("mma_kernel"):
            ptx, _ = results[str(build), 90].result()
            assert "mma.sync.aligned.m16n8k16" in ptx and "ldmatrix" not in ptx
