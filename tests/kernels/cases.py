"""Inputs for every op, shared by the CPU interpreter's tests and the GPU's."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cuformers.kernels.advance import DecodeState
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.prepare import ChunkPlan

from .attention_cases import attentions, decodes, plans, ropes
from .chunk_cases import chunks
from .judge import Call, Case, poisoned, randn
from .loss_cases import token_losses
from .moe_cases import mixtures, routes
from .speculate_cases import lookups, spreads, trapped
from .state_space_cases import state_space


def norms(sizes: tuple[tuple[int, ...], ...] = ((3, 100), (2, 2, 64), (1, 1))) -> list[Case]:
    """rms_norm and its two sums."""
    cases = []
    for shape in sizes:
        for op, operands in (("rms_norm", 1), ("add_rms_norm", 2), ("rms_norm_add", 2)):
            for offset in (0.0, 1.0):

                def make(dtype, device, shape=shape, operands=operands, offset=offset) -> Call:
                    make = {"dtype": dtype, "device": device}
                    inputs = [randn(*shape, **make) for _ in range(operands)]
                    return Call((*inputs, randn(shape[-1], **make), 1e-5, offset))

                cases.append(Case(op, f"{'x'.join(map(str, shape))}-offset{offset:.0f}", make))
    return cases


def layer_norms(sizes: tuple[tuple[int, ...], ...] = ((9, 100), (2, 2, 64), (1, 1))) -> list[Case]:
    """layer_norm with and without bias and residual, add_layer_norm; rows far from zero, where variances cancel."""
    cases = []
    for shape in sizes:
        for op, residual, biased in itertools.product(("layer_norm", "add_layer_norm"), (False, True), (False, True)):
            if op == "add_layer_norm" and not residual:
                continue

            def make(dtype, device, op=op, shape=shape, residual=residual, biased=biased) -> Call:
                make = {"dtype": dtype, "device": device}
                x, weight = randn(*shape, **make) + 5, randn(shape[-1], **make)
                bias = randn(shape[-1], **make) if biased else None
                if op == "add_layer_norm":
                    return Call((x, randn(*shape, **make), weight, bias, 1e-5))
                return Call((x, weight, bias, 1e-5), {"residual": randn(*shape, **make) if residual else None})

            name = f"{'x'.join(map(str, shape))}{'-residual' * residual}{'-bias' * biased}"
            cases.append(Case(op, name, make))
    return cases


def linears(
    sizes: tuple[tuple[int, int, int], ...] = (
        (1, 96, 13),
        (3, 320, 9),
        (4, 512, 8),
        (5, 96, 19),
        (16, 640, 9),
        (17, 48, 20),
    ),
) -> list[Case]:
    """linear and gated_linear: [T, K] x [N, K], bare and with everything that may ride along."""
    cases = []
    for T, K, N in sizes:
        for full in (False, True):

            def make(dtype, device, T=T, K=K, N=N, full=full) -> Call:
                x, weight, bias, residual = _linear_inputs(T, K, N, dtype, device)
                if not full:
                    return Call((x, weight))
                norm = Norm(randn(K, dtype=dtype, device=device), 1e-6, 1.0)
                return Call((x, weight, bias), {"norm": norm, "residual": residual, "scale": 0.5})

            def make_gated(dtype, device, T=T, K=K, N=N, full=full) -> Call:
                x, weight, bias, _ = _linear_inputs(T, K, 2 * N, dtype, device)
                norm = Norm(randn(K, dtype=torch.float32, device=device), 1e-6, 0.0)
                return Call((x, weight, bias, "gelu_tanh"), {"norm": norm}) if full else Call((x, weight, None, "silu"))

            name = f"{T}x{K}x{N}-{'full' if full else 'bare'}"
            cases += [Case("linear", name, make), Case("gated_linear", name, make_gated)]
    return cases


def invariants(
    sizes: tuple[tuple[int, int, int], ...] = ((1, 1024, 13), (17, 48, 20), (67, 50, 40)),
) -> list[Case]:
    """The same for the invariant products: two chunks of columns, descriptors, and columns that ask for pointers."""
    return [replace(case, op=f"invariant_{case.op}") for case in linears(sizes)]


def _linear_inputs(T: int, K: int, N: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    make = {"dtype": dtype, "device": device}
    return randn(T, K, **make), randn(N, K, **make) / K**0.5, randn(N, **make), randn(T, N, **make)


def activations() -> list[Case]:
    """gated_activation for each activation."""

    def maker(activation: str) -> Callable[[torch.dtype, torch.device], Call]:
        return lambda dtype, device: Call((randn(3, 2 * 50, dtype=dtype, device=device) * 3, activation))

    return [Case("gated_activation", name, maker(name)) for name in ("silu", "gelu", "gelu_tanh", "relu")]


def decode_state(device: torch.device) -> DecodeState:
    """Seven rows, the fourth of them idle, with two groups of layers."""
    positions = torch.tensor([4, 15, 30, 7, 9, 0, 47])
    lengths = torch.where(torch.tensor([1, 1, 1, 0, 1, 1, 1]) > 0, positions + 1, 0)
    slots = torch.where(lengths > 0, lengths + 100, -1)
    state = DecodeState(
        tokens=torch.arange(7),
        positions=positions.int(),
        lengths=lengths.int(),
        slots=torch.stack((slots, slots + 50)).int(),
        limits=torch.tensor([50, 50, 50, 50, 11, 50, 50]).int(),
        block_tables=torch.randperm(80)[:56].view(2, 7, 4).int(),
        history=torch.randint(0, 99, (7, 60)).int(),
        eos=torch.tensor([[7, -1, -1], [8, -1, -1], [5, 6, 9], [9, 9, 9], [-1] * 3, [9, 8, -1], [1, 2, 3]]),
        page_size=16,
    )
    return state._replace(**{name: x.to(device) for name, x in state.tensors()})


def advances() -> list[Case]:
    """advance: rows that go on (within a page and into the next), end by a token or by length, or are idle."""

    def make(dtype: torch.dtype, device: torch.device) -> Call:
        del dtype
        sampled = torch.tensor([9, 7, 9, 9, 9, 7, 9], device=device)
        return Call((), {"sampled": sampled, "state": decode_state(device)}, ("state",))

    def make_placed(dtype: torch.dtype, device: torch.device) -> Call:
        """Idle row 3 begins, row 5 ends, rows 0 and 6 go on; two tokens are nobody's."""
        del dtype
        sampled, rows = torch.tensor([[8, 9, 4, 5, 3, 99], [3, 5, -1, 0, 6, -1]], device=device)
        return Call((), {"sampled": sampled, "state": decode_state(device), "rows": rows.int()}, ("state",))

    return [Case("advance", "rows", make), Case("advance", "placed", make_placed)]


def posts() -> list[Case]:
    """post: in the first turn, and after more turns than there are slots."""

    def maker(count: int, turn: int) -> Callable[[torch.dtype, torch.device], Call]:
        def make(dtype: torch.dtype, device: torch.device) -> Call:
            del dtype
            values = torch.randint(-1, 2**40, (count,)).to(device)
            written = {"slots": torch.full((3, 600), -5), "turn": torch.tensor([turn], device=device)}
            if device.type == "cuda":
                written["slots"] = written["slots"].pin_memory()
            return Call((values,), written, ("slots", "turn"))

        return make

    return [Case("post", f"{count}-{turn}", maker(count, turn)) for count, turn in ((1, 0), (300, 5), (600, 7))]


def prepares() -> list[Case]:
    """prepare: chunks that begin, go on and end prompts, an empty one, and padding; with and without rows."""
    plans = {
        "chunks": ([0, 5, 5, 21, 22], [3, 0, 1, 6], [16, 0, 0, 40], [40, 9, 16, 41], [0, 1, 1, 1]),
        "empty": ([0, 0, 0], [0, 0], [0, 0], [0, 0], [0, 0]),
        "full": ([0, 140], [2], [0], [140], [1]),
    }

    def maker(name: str, rows: int) -> Callable[[torch.dtype, torch.device], Call]:
        def make(dtype: torch.dtype, device: torch.device) -> Call:
            del dtype
            state = decode_state(device)
            if name == "full":
                state = state._replace(history=torch.randint(0, 99, (7, 200), dtype=torch.int32, device=device))
                state = state._replace(block_tables=torch.randperm(200)[:182].view(2, 7, 13).int().to(device))
            plan = ChunkPlan(*(torch.tensor(x, dtype=torch.int32, device=device) for x in plans[name]))
            return Call((plan, state, 140, rows))

        return make

    return [Case("prepare", f"{name}-{rows}", maker(name, rows)) for name in plans for rows in (0, 5, 7)]


def all_cases() -> list[Case]:
    """Every case that is compared by relative error."""
    linear = [*norms(), *layer_norms(), *linears(), *invariants(), *activations(), *token_losses()]
    steps = [*advances(), *posts(), *prepares(), *lookups(), *trapped(), *spreads()]
    attention = [*ropes(), *plans(), *attentions(), *decodes(), *chunks()]
    return [*linear, *routes(), *mixtures(), *attention, *state_space(), *steps]


@dataclass(frozen=True)
class Sampling:
    """Per-row settings of the sampling tests: (temperature, top_k, top_p, min_p)."""

    rows: tuple[tuple[float, int, float, float], ...] = (
        (0.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.3, 20, 0.8, 0.0),
        (0.6, 20, 0.95, 0.02),
        (1.0, 0, 1.0, 0.0),
        (2.0, 10_000, 0.99, 0.0),
        (1.0, 1, 0.0, 0.0),
        (1.0, 100, 0.9, 0.0),
        (1.5, 10_000, 0.9999, 0.01),
        (1.0, 0, 0.5, 0.0),
    )

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(temperature, top_k, top_p, min_p), each [rows]."""
        temperature, top_k, top_p, min_p = zip(*self.rows)
        floats = [torch.tensor(x, dtype=torch.float32, device=device) for x in (temperature, top_p, min_p)]
        return floats[0], torch.tensor(top_k, dtype=torch.int32, device=device), floats[1], floats[2]


def check_sampling(num_tokens: int, spread: float, dtype: torch.dtype, device: torch.device, draws: int) -> None:
    """Thresholds and tokens of the Triton version against the reference on the same logits."""
    from cuformers.kernels.sample import reference, triton

    torch.manual_seed(1)
    settings = Sampling().tensors(device)
    B = len(settings[0])
    logits = (torch.randn(B, num_tokens) * spread).to(device, dtype)
    logits[1, 3] = torch.nan
    logits[2, num_tokens // 2 :] = -torch.inf
    logits[6] = logits[6].round()  # ties
    logits[10, ::3] = -1e4  # banned by a finite number
    logits[11] = 1.5  # nothing but ties
    with poisoned():
        found = triton.thresholds(logits, *settings)
    expected = reference.thresholds(logits, *settings)
    scaled = reference.scale(logits, settings[0])
    random = settings[0] > 0
    kept, right = ((scaled >= t[:, None])[random] for t in (found, expected))
    # In a flat row of very many tokens, one's share of the mass nears the rounding of float32.
    differ = (kept != right).sum(1)
    assert (differ <= num_tokens // 30_000).all(), f"kept {kept.sum(1).tolist()} of {right.sum(1).tolist()}"
    seeds = torch.arange(B, device=device) * 7919 + 2**40
    for draw in range(draws):
        positions = torch.full((B,), draw * 2**31 + draw, device=device)
        with poisoned():
            tokens = triton.sample(logits, *settings, seeds, positions)
        assert torch.equal(tokens, reference.sample(logits, *settings, seeds, positions))
    assert torch.equal(triton.argmax(logits), reference.argmax(logits))
