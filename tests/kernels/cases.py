"""Inputs for every op, shared by the CPU interpreter's tests and the GPU's; and how a result is judged.

The oracle is the reference on inputs lifted to float32. Sizes are odd on purpose: no dim is a power of two by rule.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cuformers.kernels import table
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.op import Problem

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Greatest ||out - oracle|| / ||oracle||: a few roundings of the dtype; the same on the CPU and on a GPU."""


@dataclass
class Call:
    """Arguments of an op; `written` names those that it writes, to be compared as results."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    def run(self, function: Callable, *, lift: bool = False) -> list[Tensor]:
        """The results of the function on copies of the arguments, in float32 where `lift`."""
        args = [_copy(a, lift) for a in self.args]
        kwargs = {k: _copy(v, lift) for k, v in self.kwargs.items()}
        out = function(*args, **kwargs)
        return [*(out if isinstance(out, tuple) else (out,)), *(kwargs[name] for name in self.written)]


@dataclass(frozen=True)
class Case:
    """A named way to make a call for a dtype and device."""

    op: str
    name: str
    make: Callable[[torch.dtype, torch.device], Call]

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def _copy(value: Any, lift: bool) -> Any:
    if isinstance(value, Norm):
        return Norm(_copy(value.weight, lift), value.eps, value.offset)
    if not isinstance(value, Tensor):
        return value
    value = value.clone()
    return value.float() if lift and value.is_floating_point() else value


def error(out: Tensor, oracle: Tensor) -> float:
    """Relative error; NaN where only one of both is not a number, as that passes no comparison."""
    out, oracle = out.double().cpu(), oracle.double().cpu()
    poison = oracle.isnan()
    if not torch.equal(out.isnan(), poison):
        return float("nan")
    out, oracle = (torch.where(poison, 0.0, x) for x in (out, oracle))
    return ((out - oracle).norm() / oracle.norm().clamp(min=1e-9)).item()


def check(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Runs the Triton implementation on poisoned memory and compares all results with the oracle."""
    torch.manual_seed(0)
    call = case.make(dtype, device)
    implementations = next(op for op in table.OPS if op.name == case.op).implementations
    triton, reference = (next(i for i in implementations if i.name == name) for name in ("triton", "reference"))
    with poisoned():
        outs = call.run(triton.load())
    oracles = call.run(reference.load(), lift=True)
    assert len(outs) == len(oracles)
    for i, (out, oracle) in enumerate(zip(outs, oracles)):
        assert out.shape == oracle.shape
        assert error(out, oracle) <= TOLERANCE[dtype], f"result {i} of {case}: {error(out, oracle):.2e}"


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN (integers: the largest), so that what a kernel leaves unwritten is seen."""
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


def triton_kernels(dtype: torch.dtype) -> table.Kernels:
    """The table that a GPU of capability 9.0 gets."""
    return table.select(Problem(device="cuda", capability=(9, 0), dtype=dtype), "triton")


def _randn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape).to(device, dtype)


def norms(sizes: tuple[tuple[int, ...], ...] = ((3, 100), (2, 2, 64), (1, 1))) -> list[Case]:
    """rms_norm and its two sums."""
    cases = []
    for shape in sizes:
        for op, operands in (("rms_norm", 1), ("add_rms_norm", 2), ("rms_norm_add", 2)):
            for offset in (0.0, 1.0):

                def make(dtype, device, shape=shape, operands=operands, offset=offset) -> Call:
                    make = {"dtype": dtype, "device": device}
                    inputs = [_randn(*shape, **make) for _ in range(operands)]
                    return Call((*inputs, _randn(shape[-1], **make), 1e-5, offset))

                cases.append(Case(op, f"{'x'.join(map(str, shape))}-offset{offset:.0f}", make))
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
                norm = Norm(_randn(K, dtype=dtype, device=device), 1e-6, 1.0)
                return Call((x, weight, bias), {"norm": norm, "residual": residual, "scale": 0.5})

            def make_gated(dtype, device, T=T, K=K, N=N, full=full) -> Call:
                x, weight, bias, _ = _linear_inputs(T, K, 2 * N, dtype, device)
                norm = Norm(_randn(K, dtype=torch.float32, device=device), 1e-6, 0.0)
                return Call((x, weight, bias, "gelu_tanh"), {"norm": norm}) if full else Call((x, weight, None, "silu"))

            name = f"{T}x{K}x{N}-{'full' if full else 'bare'}"
            cases += [Case("linear", name, make), Case("gated_linear", name, make_gated)]
    return cases


def _linear_inputs(T: int, K: int, N: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    make = {"dtype": dtype, "device": device}
    return _randn(T, K, **make), _randn(N, K, **make) / K**0.5, _randn(N, **make), _randn(T, N, **make)


def activations() -> list[Case]:
    """gated_activation for each activation."""

    def maker(activation: str) -> Callable[[torch.dtype, torch.device], Call]:
        return lambda dtype, device: Call((_randn(3, 2 * 50, dtype=dtype, device=device) * 3, activation))

    return [Case("gated_activation", name, maker(name)) for name in ("silu", "gelu", "gelu_tanh", "relu")]


@dataclass(frozen=True)
class RopeShape:
    """A rope_cache problem: `rot` rotated dims (0: none), which norms there are, and whether a cache is written."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    rot: int
    norm: str = ""
    cache: bool = True


ROPES = (
    RopeShape(3, 4, 2, 128, 128, "qk"),
    RopeShape(2, 4, 2, 80, 32, "q"),
    RopeShape(33, 4, 2, 96, 96, "k"),
    RopeShape(2, 2, 1, 64, 0),
    RopeShape(2, 2, 1, 64, 0, "qk"),
    RopeShape(2, 3, 3, 64, 48, cache=False),
)


def ropes(shapes: tuple[RopeShape, ...] = ROPES) -> list[Case]:
    """rope_cache; the cache starts as NaN, and one token has no slot."""
    cases = []
    for s in shapes:

        def make(dtype, device, s=s) -> Call:
            make = {"dtype": dtype, "device": device}
            qkv = _randn(s.tokens, (s.heads + 2 * s.kv_heads) * s.dim, **make)
            angle = torch.rand(40, s.rot // 2, device=device) * 6 if s.rot else None
            factors = (None, None) if angle is None else (angle.cos(), angle.sin())
            rows = torch.randint(0, 40, (s.tokens,), dtype=torch.int32, device=device)
            kwargs: dict[str, Any] = {"num_heads": s.heads, "num_kv_heads": s.kv_heads, "head_dim": s.dim}
            for letter in s.norm:
                kwargs[f"{letter}_norm"] = Norm(_randn(s.dim, **make), 1e-6, float(letter == "k"))
            if not s.cache:
                return Call((qkv, *factors, rows), kwargs)
            pages = -(-s.tokens // 16) + 2
            slots = torch.randperm(pages * 16)[: s.tokens].int().to(device)
            slots[-1] = -1
            pool = torch.full((2, pages, s.kv_heads, 16, s.dim), torch.nan, **make)
            kwargs |= {"k_cache": pool[0], "v_cache": pool[1], "slots": slots}
            return Call((qkv, *factors, rows), kwargs, ("k_cache", "v_cache"))

        name = f"{s.tokens}tok-{s.heads}h{s.kv_heads}-d{s.dim}r{s.rot}{s.norm}{'' if s.cache else '-nocache'}"
        cases.append(Case("rope_cache", name, make))
    return cases


@dataclass(frozen=True)
class AttentionShape:
    """A paged_attention problem; lengths of 0 are padding rows."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


ATTENTIONS = (
    AttentionShape((70, 0, 33), 4, 2, 64),
    AttentionShape((200,), 2, 1, 128, sinks=True),
    AttentionShape((1, 16, 17), 4, 2, 80, page=64, softcap=20.0),
    AttentionShape((100, 7), 3, 3, 96, page=32, window=20),
    AttentionShape((150,), 2, 2, 256, page=128, window=50, sinks=True),
)


def attentions(shapes: tuple[AttentionShape, ...] = ATTENTIONS) -> list[Case]:
    """paged_attention on a pool that is NaN wherever no key may be seen."""
    cases = []
    for s in shapes:
        for work in (False, True):
            name = f"{'-'.join(map(str, s.lengths))}-{s.heads}h{s.kv_heads}-d{s.dim}p{s.page}{'-work' if work else ''}"
            cases.append(
                Case("paged_attention", name, lambda dtype, device, s=s, work=work: attend(s, work, dtype, device))
            )
    return cases


def attend(s: AttentionShape, work: bool, dtype: torch.dtype, device: torch.device) -> Call:
    """The call of one shape."""
    from cuformers.kernels.paged_attention.workspace import workspace

    N, blocks = len(s.lengths), -(-max(s.lengths) // s.page)
    pages = N * blocks + 1
    pool = torch.full((2, pages, s.kv_heads, s.page, s.dim), torch.nan)
    tables = torch.randperm(pages)[: N * blocks].view(N, blocks).int()
    for n, length in enumerate(s.lengths):
        position = torch.arange(0 if s.window is None else max(0, length - s.window), length)
        seen = torch.randn(2, len(position), s.kv_heads, s.dim)
        pool[:, tables[n, position // s.page].long(), :, position % s.page] = seen.transpose(0, 1)
        tables[n, -(-length // s.page) :] = -7
    kwargs: dict[str, Any] = {"scale": s.dim**-0.5, "window": s.window, "softcap": s.softcap}
    kwargs["sinks"] = torch.randn(s.heads).to(device, dtype) if s.sinks else None
    kwargs["workspace"] = workspace(N, s.heads, s.dim, device) if work else None
    q = _randn(N, s.heads, s.dim, dtype=dtype, device=device)
    lengths = torch.tensor(s.lengths, dtype=torch.int32)
    return Call((q, *pool.to(device, dtype), tables.to(device), lengths.to(device)), kwargs)


def all_cases() -> list[Case]:
    """Every case that is compared by relative error."""
    return [*norms(), *linears(), *activations(), *ropes(), *attentions()]


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
