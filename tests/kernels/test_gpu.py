"""The interpreter's cases, and the shapes of real models, on a GPU; in CUDA graphs too, where they live."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from cuformers.kernels.cache_scales import bytes_of
from cuformers.kernels.norm_args import Norm

from .attention_cases import AttentionShape, DecodeShape, RopeShape, attend, attentions, decode, decodes, ropes
from .cases import all_cases, check_sampling, invariants, layer_norms, linears, norms
from .chunk_cases import ChunkShape, chunk, chunks
from .fp8_cases import DECODES, WRITES, check_decode, check_write, fp8_decode
from .invariance import Operands, check_cuts, check_numbers_of_rows
from .judge import Call, Case, check, error, triton_kernels
from .logprobs_cases import check_logprobs
from .loss_cases import (
    REAL_HEADS,
    SMALL_HEADS,
    WAYS,
    HeadShape,
    check_loss_gradients,
    check_losses_twice,
    check_losses_under_autocast,
    token_losses,
)
from .moe_cases import SMALL, ExpertShape, check_alone, check_gradients, check_order, choices, mixtures, operands
from .penalty_cases import check_penalties
from .speculate_cases import LookupShape, lookups, on, repeating, speculate, trapped
from .state_space_cases import ScanShape, convolutions, scans, ssd_scans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = torch.device("cuda", 0)
NAN = 0x7F
"""Of e4m3."""
QWEN3_06B = [(T, K, N) for T in (1, 2, 4, 8, 16, 64) for K, N in ((1024, 4096), (2048, 1024), (3072, 1024))]
REAL_EXPERTS = (
    *(ExpertShape(T, 32, 8, 2048, 768) for T in (1, 4, 5, 64, 600)),
    *(ExpertShape(T, 32, 8, 2048, 768, "first") for T in (2, 9, 2000)),
    ExpertShape(2, 3, 2, 4096, 14336),
    ExpertShape(50, 3, 2, 4096, 14336),
    ExpertShape(3000, 40, 1, 512, 192, "one"),
    ExpertShape(33, 60, 4, 2048, 1408, "few"),
)
REAL = [
    *norms(((1, 1024), (64, 4096), (3, 5120))),
    *layer_norms(((1, 384), (20_001, 768), (17_000, 384), (8192, 4096), (64, 4096), (3, 5120))),
    *linears((*QWEN3_06B, (1, 4096, 6144), (2, 12288, 4096), (8, 12288, 512), (1, 1024, 151936), (3, 896, 4864))),
    *invariants(((1, 4096, 6144), (100, 12288, 4096), (256, 4096, 4096), (1500, 2048, 1024), (3, 896, 4864))),
    *ropes((RopeShape(1, 16, 8, 128, 128, "qk"), RopeShape(300, 32, 8, 128, 128, "qk"), RopeShape(5, 32, 2, 80, 32))),
    *attentions(
        (
            AttentionShape((129,), 16, 8, 128),
            AttentionShape((8192, 1, 777, 0), 16, 8, 128, page=64),
            AttentionShape((1000,) * 40, 32, 8, 128, page=256),
            AttentionShape((3000, 50), 64, 8, 64, window=128, sinks=True),
            AttentionShape((500, 700), 8, 4, 256, window=300, softcap=50.0),
            AttentionShape((900,), 32, 32, 96),
            AttentionShape((400, 3), 71, 1, 64),
            AttentionShape((129,), 16, 8, 128, page=64, fp8=True),
            AttentionShape((8192, 1, 777, 0), 16, 8, 128, page=64, fp8=True),
            AttentionShape((1000,) * 40, 32, 8, 128, page=64, fp8=True),
            AttentionShape((3000, 50), 64, 8, 64, window=128, sinks=True, fp8=True),
            AttentionShape((500, 700), 8, 4, 256, page=64, window=300, softcap=50.0, fp8=True),
            AttentionShape((900,), 32, 32, 96, page=64, fp8=True),
        )
    ),
    *decodes(
        (
            DecodeShape(AttentionShape((129,), 16, 8, 128, page=64), 128, norm=True),
            DecodeShape(AttentionShape((8192, 1, 777, 0), 16, 8, 128, page=64), 128, norm=True),
            DecodeShape(AttentionShape((1000,) * 40, 32, 8, 128, page=256), 128),
            DecodeShape(AttentionShape((500, 700), 8, 4, 256, window=300, softcap=50.0), 64, norm=True),
            DecodeShape(AttentionShape((900, 16), 14, 2, 64), 64),
        )
    ),
    *mixtures(REAL_EXPERTS),
    *convolutions((((2048, 1, 700), 5376, 4), ((300,) * 20, 10240, 4))),
    *scans((ScanShape((300, 1, 77), 5120, 1, 1, 16, True), ScanShape((500,), 8192, 1, 1, 16, False))),
    *ssd_scans(
        (
            ScanShape((600, 1, 77), 80, 1, 64, 128, True),
            ScanShape((300,), 128, 8, 64, 128, False),
            ScanShape((100, 129), 24, 1, 128, 128, True),
        )
    ),
    *token_losses(REAL_HEADS),
    *trapped(4096),
    *lookups(
        (
            LookupShape((300,), 300),
            LookupShape((4000, 1, 0, 3999, 700), 90),
            LookupShape((100_000, 12, 50_000), 40, count=7),
            LookupShape((9000,) * 140, 12),
        )
    ),
    *chunks(
        (
            ChunkShape(((1500, 1500), (700, 3000), (1, 900)), 16, 8, 128, page=64, padding=100),
            ChunkShape(((128, 128),) * 16, 32, 8, 128, page=256),
            ChunkShape(((16, 4000), (3, 5000), (0, 0)), 16, 8, 128, page=64),
            ChunkShape(((900, 2500),), 64, 8, 64, page=64, window=128, sinks=True),
            ChunkShape(((500, 900), (300, 300)), 8, 4, 256, page=64, window=300, softcap=50.0),
            ChunkShape(((400, 1000),), 32, 32, 96, page=128),
            ChunkShape(((300, 600), (5, 9)), 32, 8, 80, page=16),
            ChunkShape(((120, 120),), 71, 1, 64, page=32),
            ChunkShape(((1500, 1500), (700, 3000), (1, 900)), 16, 8, 128, page=64, padding=100, fp8=True),
            ChunkShape(((16, 4000), (3, 5000), (0, 0)), 16, 8, 128, page=64, fp8=True),
            ChunkShape(((900, 2500),), 64, 8, 64, page=64, window=128, sinks=True, fp8=True),
            ChunkShape(((500, 900), (300, 300)), 8, 4, 256, page=64, window=300, softcap=50.0, fp8=True),
        )
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*all_cases(), *REAL], ids=str)
def test_matches_the_reference(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, GPU)


BIG_WRITES = (RopeShape(1, 16, 8, 128, 128, "qk"), RopeShape(300, 32, 8, 128, 128, "qk"), RopeShape(5, 32, 2, 80, 32))
BIG_DECODES = (
    DecodeShape(AttentionShape((129,), 16, 8, 128, page=64), 128, norm=True),
    DecodeShape(AttentionShape((8192, 1, 777, 0), 16, 8, 128, page=64), 128, norm=True),
    DecodeShape(AttentionShape((1000,) * 40, 32, 8, 128, page=64), 128),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*WRITES, *BIG_WRITES], ids=str)
def test_tokens_are_written_in_fp8(shape: RopeShape, dtype: torch.dtype) -> None:
    check_write(shape, dtype, GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*DECODES, *BIG_DECODES], ids=str)
def test_decoding_reads_the_fp8_key_that_it_has_written(shape: DecodeShape, dtype: torch.dtype) -> None:
    check_decode(shape, dtype, GPU)


@pytest.mark.parametrize("T", [1, 3, 40])
def test_a_chain_over_fp8_caches_in_a_graph_gives_the_eager_result_every_time(T: int) -> None:
    """Each layer's newest key and factor are NaN until the layer has written them."""
    from cuformers.kernels.attention_plan.triton import attention_plan
    from cuformers.kernels.decode_attention.triton import decode_attention

    torch.manual_seed(0)
    layers = [
        fp8_decode(DecodeShape(AttentionShape((333,) * T, 16, 8, 128, page=64), 128), torch.bfloat16, GPU)
        for _ in range(12)
    ]
    x = layers[0]["qkv"]

    def run() -> torch.Tensor:
        plan, h = attention_plan(layers[0]["lengths"], num_kv_heads=8), x * 1
        for layer in layers:
            out = decode_attention(**(layer | {"qkv": h * 1, "plan": plan})).flatten(1)
            h = torch.cat((out, h[:, out.shape[1] :]), dim=1)
        return h

    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    assert expected.isfinite().all()
    for _ in range(30):
        for layer in layers:
            page, offset = layer["slots"].long() // 64, layer["slots"].long() % 64
            for cache, scale in zip((layer["k_cache"], layer["v_cache"]), layer["scales"]):
                bytes_of(cache)[page, :, offset] = NAN
                scale[page, :, offset] = torch.nan
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spread", [0.3, 3.0, 10.0])
@pytest.mark.parametrize("num_tokens", [300, 32_000, 151_936, 262_144])
def test_sampling_matches_the_reference(num_tokens: int, spread: float, dtype: torch.dtype) -> None:
    check_sampling(num_tokens, spread, dtype, GPU, draws=20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("top", [0, 1, 5, 32])
@pytest.mark.parametrize("num_tokens", [32, 50_257, 151_936, 262_144, 300_000])
def test_logprobs_match_the_reference(num_tokens: int, top: int, dtype: torch.dtype) -> None:
    check_logprobs(num_tokens, top, dtype, GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens, longest", [(40, 150), (50_257, 3000), (151_936, 40_000), (262_144, 500)])
def test_penalties_match_the_reference(num_tokens: int, longest: int, dtype: torch.dtype) -> None:
    check_penalties(num_tokens, longest, dtype, GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [*SMALL, ExpertShape(3000, 32, 8, 1024, 768), ExpertShape(700, 16, 4, 2048, 1408, "few", "gelu_tanh")],
    ids=str,
)
def test_gradients_of_the_experts_are_the_references(shape: ExpertShape, dtype: torch.dtype) -> None:
    check_gradients(shape, dtype, GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [*SMALL_HEADS, *REAL_HEADS], ids=str)
def test_gradients_of_losses_are_the_references(shape: HeadShape, way: str, dtype: torch.dtype) -> None:
    check_loss_gradients(shape, way, dtype, GPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_are_the_same_in_two_passes(dtype: torch.dtype) -> None:
    check_losses_twice(dtype, GPU)


def test_losses_under_autocast() -> None:
    check_losses_under_autocast(GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_losses_of_several_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuformers.kernels.linear_cross_entropy import chunks

    monkeypatch.setattr(chunks, "CHUNK_BYTES", 300 * 50_272 * dtype.itemsize)
    for way in WAYS:
        check_loss_gradients(HeadShape(700, 256, 50_257), way, dtype, GPU)


def test_losses_wait_for_nothing_and_take_less_memory_than_the_logits() -> None:
    """Labels that are no tokens included: their losses are NaN, others' are not."""
    from cuformers.cuda import memory
    from cuformers.kernels.linear_cross_entropy.triton import linear_cross_entropy

    T, H, V = 16_384, 256, 65_536
    x = torch.randn(T, H, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(V, H, device=GPU, dtype=torch.bfloat16) / 16).requires_grad_()
    labels = torch.arange(T, device=GPU)
    for wrong in (False, True, False):
        labels[7] = V if wrong else -100
        torch.cuda.synchronize()
        memory.reset_peak(GPU)
        before = memory.allocated_bytes(GPU)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = linear_cross_entropy(x, weight, labels)
            found.total.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert memory.peak_bytes(GPU) - before < 1.3e9 < T * V * 2
        assert found.nll.isnan().sum() == found.total.isnan() == wrong and bool(found.nll[7]) == wrong
        x.grad = weight.grad = None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [ExpertShape(70, 5, 2, 48, 40), ExpertShape(600, 32, 8, 2048, 768)], ids=str)
def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(shape: ExpertShape, dtype: torch.dtype) -> None:
    check_alone(shape, dtype, GPU, torch.equal)


@pytest.mark.parametrize("P", [1, 40, 512, 1024, 1025, 131_072])
@pytest.mark.parametrize(("E", "block_m"), [(8, 128), (128, 16), (60, 64), (500, 64)])
def test_pairs_are_sorted_by_expert(P: int, E: int, block_m: int) -> None:
    check_order(P, E, block_m, GPU)


@pytest.mark.parametrize("T", [1, 4, 6, 64, 500])
def test_one_graph_serves_any_routing(T: int) -> None:
    """Random, all tokens to the same experts, and back; the sort and the tiles follow the logits on the device."""
    from cuformers.kernels.experts.reference import experts
    from cuformers.kernels.moe_route.reference import moe_route

    torch.manual_seed(0)
    kernels, shape = triton_kernels(torch.bfloat16), ExpertShape(T, 60, 4, 512, 192)
    x, gate_up, down, _, _, residual = operands(shape, torch.bfloat16, GPU)
    logits = torch.randn(T, 60, device=GPU, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        routes = kernels.moe_route(logits * 1, 4, normalise=True)
        return kernels.experts(x, gate_up, down, *routes, "silu", residual=residual)

    graph, out = _captured(run)
    for routing in ("first", "random", "few", "first", "random"):
        ids = choices(shape._replace(routing=routing)).to(GPU).long()
        logits.copy_(torch.randn(T, 60, device=GPU)).scatter_add_(1, ids, torch.full_like(ids, 20).bfloat16())
        graph.replay()
        routes = moe_route(logits, 4, normalise=True)
        assert torch.equal(routes.ids.long().sort(1).values, ids.sort(1).values)
        assert error(out, experts(x, gate_up, down, *routes, "silu", residual=residual)) < 1.5e-2
        again = out.clone()
        graph.replay()
        assert torch.equal(out, again)


def test_rows_do_not_depend_on_the_values_beside_them() -> None:
    from cuformers.kernels.linear.triton import linear

    torch.manual_seed(0)
    weight = torch.randn(1024, 2048, device=GPU, dtype=torch.bfloat16)
    for T in (2, 4, 8, 16):
        x, other = torch.randn(2, T, 2048, device=GPU, dtype=torch.bfloat16)
        other[0] = x[0]
        assert torch.equal(linear(x, weight)[0], linear(other, weight)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("N", "K", "activation"),
    [(1024, 2048, "none"), (640, 1032, "none"), (200, 100, "none"), (640, 1024, "silu"), (200, 100, "gelu_tanh")],
)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(N: int, K: int, activation: str, dtype: torch.dtype) -> None:
    operands = Operands(2048, N, K, activation=activation, dtype=dtype, device=GPU)
    check_numbers_of_rows(operands, range(1, 301))
    check_cuts(operands)


@pytest.mark.parametrize(
    ("N", "K", "activation"), [(4096, 12288, "none"), (6144, 4096, "none"), (12288, 4096, "silu")]
)
def test_bits_of_a_row_at_real_sizes(N: int, K: int, activation: str) -> None:
    operands = Operands(2048, N, K, activation=activation, dtype=torch.bfloat16, device=GPU)
    check_numbers_of_rows(operands, (1, 2, 3, 8, 16, 17, 64, 100, 128, 129, 256, 1000))
    check_cuts(operands)


class Layer(NamedTuple):
    """Weights of a decoder layer in the shape of Qwen3-0.6B, and its cache."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: Norm
    pool: torch.Tensor


def _layer(pool: torch.Tensor) -> Layer:
    shapes = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
    weights = [torch.randn(s, device=GPU, dtype=torch.bfloat16) / s[1] ** 0.5 for s in shapes]
    return Layer(*weights, Norm(torch.ones(1024, device=GPU, dtype=torch.bfloat16), 1e-6, 0.0), pool.clone())


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("T", [1, 3, 8])
def test_a_chain_in_a_graph_gives_the_eager_result_every_time(
    T: int, fused: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many layers in one graph, each reading what the one before has just written: what PDL may break."""
    from cuformers.kernels.paged_attention import triton as attention

    cut = attention.config(T, 8, 128, 2)._replace(early=early)
    monkeypatch.setattr(attention, "config", lambda *_, **__: cut)
    torch.manual_seed(0)
    kernels = triton_kernels(torch.bfloat16)
    call = attend(AttentionShape((333,) * T, 16, 8, 128), False, torch.bfloat16, GPU)
    _, k_cache, v_cache, tables, lengths = call.args
    layers = [_layer(torch.stack((k_cache, v_cache))) for _ in range(12)]
    angle = torch.rand(400, 64, device=GPU) * 6
    cos, sin, rows = angle.cos(), angle.sin(), lengths - 1
    slots = tables[:, 332 // 16] * 16 + 332 % 16
    x = torch.randn(T, 1024, device=GPU, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        plan = kernels.attention_plan(lengths, num_kv_heads=8)
        h = x * 1
        for layer in layers:
            k, v = layer.pool
            qkv = kernels.linear(h, layer.qkv, norm=layer.norm)
            if fused:
                a = kernels.decode_attention(
                    qkv, cos, sin, rows, k, v, slots, tables, lengths, num_heads=16, scale=128**-0.5, plan=plan
                )
            else:
                q, _, _ = kernels.rope_cache(
                    qkv, cos, sin, rows, num_heads=16, num_kv_heads=8, head_dim=128, k_cache=k, v_cache=v, slots=slots
                )
                a = kernels.paged_attention(q, k, v, tables, lengths, scale=128**-0.5, plan=plan)
            h = kernels.linear(a.flatten(1), layer.out, residual=h)
            y = kernels.gated_linear(h, layer.gate_up, None, "silu", norm=layer.norm)
            h = kernels.linear(y, layer.down, residual=h)
        return h

    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    assert expected.isfinite().all()
    for _ in range(50):
        for layer in layers:
            # A key read before it is written shows.
            layer.pool.view(2, -1, 8, 16, 128)[:, slots // 16, :, slots % 16] = torch.nan
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


def _captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("shared", [False, True])
def test_graph_follows_the_lengths_on_the_device(shared: bool) -> None:
    """A captured graph reads lengths when it runs, not when it was made: in a plan of its own or in a shared one."""
    from cuformers.kernels.attention_plan.triton import attention_plan
    from cuformers.kernels.paged_attention import reference, triton

    torch.manual_seed(0)
    call: Call = attend(AttentionShape((6000, 600), 16, 8, 128), False, torch.bfloat16, GPU)

    def run() -> torch.Tensor:
        plan = attention_plan(call.args[4], num_kv_heads=8) if shared else None
        q = call.args[0] * 1
        return triton.paged_attention(q, *call.args[1:], **(call.kwargs | {"plan": plan}))

    graph, out = _captured(run)
    for now in ((1, 600), (0, 64), (5900, 599)):
        call.args[4].copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        assert error(out, reference.paged_attention(*call.args, **call.kwargs)) < 1.5e-2


def test_fixed_stretches_give_a_row_the_same_bits_in_any_batch() -> None:
    from cuformers.kernels.attention_plan.triton import attention_plan
    from cuformers.kernels.paged_attention.triton import paged_attention

    torch.manual_seed(0)
    call: Call = attend(AttentionShape((6000, 0, 513, 512, 1) * 4, 32, 8, 128, page=64), False, torch.bfloat16, GPU)
    q, k_cache, v_cache, tables, lengths = call.args

    def rows(start: int, stop: int) -> torch.Tensor:
        plan = attention_plan(lengths[start:stop], num_kv_heads=8, stretch=512, longest=6000)
        cut = slice(start, stop)
        query = q[cut] * 1  # an ordinary kernel between the plan and the first that reads it early
        return paged_attention(query, k_cache, v_cache, tables[cut], lengths[cut], **(call.kwargs | {"plan": plan}))

    together = rows(0, 20)
    assert all(torch.equal(together[n : n + 1], rows(n, n + 1)) for n in range(20))


def test_a_graph_of_decode_attention_writes_where_the_slots_on_the_device_say() -> None:
    """Lengths, slots and rows that change between replays."""
    from cuformers.kernels.decode_attention import reference, triton

    torch.manual_seed(0)
    shape = AttentionShape((600, 600), 16, 8, 128)
    call = decode(DecodeShape(shape, 128, norm=True), False, torch.bfloat16, GPU)
    arguments = call.kwargs
    graph, out = _captured(lambda: triton.decode_attention(**arguments))
    for now in ((1, 599), (0, 64), (65, 598)):
        lengths = torch.tensor(now, dtype=torch.int32, device=GPU)
        last = (lengths - 1).clamp(min=0)
        slots = arguments["block_tables"].gather(1, last[:, None].long() // 16)[:, 0] * 16 + last % 16
        arguments["lengths"].copy_(lengths)
        arguments["slots"].copy_(slots.where(lengths > 0, -1))
        arguments["rows"].copy_(last % 40)
        caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
        graph.replay()
        assert error(out, reference.decode_attention(**(arguments | caches))) < 1.5e-2
        assert all(error(arguments[name], cache) < 1.5e-2 for name, cache in caches.items())


def test_a_graph_of_chunks_follows_the_bounds_on_the_device() -> None:
    """Bounds, rows and lengths that change between replays: fewer chunks, empty ones, padding."""
    from cuformers.kernels.chunk_attention import reference, triton

    torch.manual_seed(0)
    shape = ChunkShape(((400, 700), (200, 600)), 16, 8, 128, page=64, padding=40)
    call = chunk(shape, torch.bfloat16, GPU)
    graph, out = _captured(lambda: triton.chunk_attention(*call.args, **call.kwargs))
    bounds, rows, lengths = call.args[4:]
    first, second = rows.tolist()
    for now in (
        ((0, 200, 640), (first, second), (200, 600)),
        ((0, 0, 1), (first, second), (0, 600)),
        ((0, 5, 5), (second, first), (333, 0)),
        ((0, 0, 0), (0, 0), (0, 0)),
    ):
        for there, values in zip((bounds, rows, lengths), now):
            there.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        expected = reference.chunk_attention(*call.args, **call.kwargs)
        assert error(out, expected) < 1.5e-2 and not out[bounds[-1] :].any()


@pytest.mark.parametrize("width", [250, 20_000])
def test_a_graph_of_speculative_steps_goes_on_from_what_it_accepted(width: int) -> None:
    """Each replay starts from the state that the one before has left; the CPU does the same by the references."""
    from cuformers.kernels.table import reference

    torch.manual_seed(0)
    state = repeating(width)
    ours, ops = on(state, GPU), triton_kernels(torch.bfloat16)
    emitted = [speculate(ops, ours, 4).cpu()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = speculate(ops, ours, 4)
    for _ in range(30):
        graph.replay()
        emitted.append(out.cpu())
    expected = [speculate(reference(), state, 4) for _ in emitted]
    assert all(torch.equal(a, b) for a, b in zip(emitted, expected))
    assert all(torch.equal(a.cpu(), b) for (_, a), (_, b) in zip(ours.tensors(), state.tensors()))
    assert (expected[10] >= 0).sum(1).tolist() == [5, 5, 0, 5] and not state.lengths.any()
