"""What holds for a deterministic table: a row's results, whatever stands beside it and however its keys came.

`same` compares: to the bit on a GPU; nearly in the interpreter, where NumPy's exponential depends in its last bit on an
element's place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuformers.kernels.norm_args import Norm
from cuformers.kernels.op import Problem
from cuformers.kernels.penalize import Penalties, workspace
from cuformers.kernels.table import Kernels, select

from .judge import poisoned, randn, varied

Same = Callable[[Tensor, Tensor], bool]


def nearly(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def kernels(dtype: torch.dtype) -> Kernels:
    """The table of a deterministic model on a GPU of capability 9.0."""
    return select(Problem(device="cuda", capability=(9, 0), dtype=dtype), deterministic=True)


@dataclass(frozen=True)
class Heads:
    """The attention of a layer."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    window: int | None = None
    softcap: float | None = None

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.dim}

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.dim**-0.5, "window": self.window, "softcap": self.softcap}

    def __str__(self) -> str:
        return f"{self.heads}h{self.kv_heads}-d{self.dim}-w{self.window}-c{self.softcap}"


class Sequence:
    """Projected rows of one sequence, in a cache of its own; what is not written yet is NaN."""

    def __init__(self, h: Heads, length: int, dtype: torch.dtype, device: torch.device, page: int = 64) -> None:
        torch.manual_seed(length)
        make = {"dtype": dtype, "device": device}
        self.h, self.length, self.page, self.device = h, length, page, device
        self.qkv = randn(length, h.width, **make)
        angle = torch.rand(length, h.dim // 2) * 6
        self.cos, self.sin = angle.cos().to(device), angle.sin().to(device)
        self.norms = {f"{x}_norm": Norm(randn(h.dim, **make), 1e-6, 1.0) for x in "qk"}
        self.make, self.ops = make, kernels(dtype)
        self.start_again()

    def start_again(self) -> None:
        """An empty cache, on other pages."""
        blocks = -(-self.length // self.page)
        pool = torch.full((2, blocks + 2, self.h.kv_heads, self.page, self.h.dim), torch.nan, **self.make)
        self.caches = {"k_cache": pool[0], "v_cache": pool[1]}
        self.table = torch.randperm(blocks + 2)[:blocks].int().to(self.device)

    def _rope(self, begin: int, end: int) -> tuple[Any, ...]:
        position = torch.arange(begin, end, device=self.device, dtype=torch.int32)
        slots = self.table[position // self.page] * self.page + position % self.page
        return self.qkv[begin:end].clone(), self.cos, self.sin, position, slots.int()

    def chunk(self, begin: int, end: int, beside: int = 0) -> Tensor:
        """Attention of the tokens begin..end, which join the cache; `beside` as many tokens of padding."""
        *rope, slots = self._rope(begin, end)
        q, _, _ = self.ops.rope_cache(*rope, slots=slots, **self.norms, **self.caches, **self.h.sizes)
        q = torch.cat((q, q.new_ones(beside, *q.shape[1:])))
        numbers = ([0, end - begin, end - begin], [1, 0], [end, 0])
        integers = (torch.tensor(n, dtype=torch.int32, device=self.device) for n in numbers)
        tables = torch.stack((self.table.flip(0), self.table))
        with poisoned():
            out = self.ops.chunk_attention(q, *self.caches.values(), tables, *integers, **self.h.options)
        return out[: end - begin]

    def decoded(self, at: int, rows: int) -> Tensor:
        """Attention of the token `at` as the last of so many decoding rows, of which the others are idle."""
        qkv, cos, sin, position, slots = self._rope(at, at + 1)
        last = torch.arange(rows, device=self.device) == rows - 1
        tables = self.table.expand(rows, -1).contiguous()
        lengths = (last * (at + 1)).int()
        plan = self.ops.attention_plan(lengths, num_kv_heads=self.h.kv_heads, window=self.h.window)
        with poisoned():
            out = self.ops.decode_attention(
                qkv.expand(rows, -1).contiguous(), cos, sin, position.expand(rows).contiguous(),
                slots=slots.where(last, -1).int(), block_tables=tables, lengths=lengths, num_heads=self.h.heads,
                plan=plan, **self.caches, **self.norms, **self.h.options,
            )  # fmt: skip
        assert not out[:-1].any()
        return out[-1:]


def check_attention(
    h: Heads, length: int, dtype: torch.dtype, device: torch.device, same: Same, steps: tuple[int, ...]
) -> None:
    """A sequence as one chunk, in chunks of each of these sizes, and token by token."""
    sequence = Sequence(h, length, dtype, device)
    whole = sequence.chunk(0, length)
    assert varied(whole)
    for step in steps:
        sequence.start_again()
        for begin in range(0, length, step):
            end = min(begin + step, length)
            if step == 1:
                found = sequence.decoded(begin, rows=1 + begin % 9)
            else:
                found = sequence.chunk(begin, end, beside=begin % 50)
            assert same(found, whole[begin:end]), f"tokens {begin} to {end} differ in chunks of {step}"


def check_rope(h: Heads, dtype: torch.dtype, device: torch.device, same: Same, sizes: tuple[int, ...]) -> None:
    """With a cache and without, with gradients and without, of any number of tokens."""
    sequence = Sequence(h, max(sizes), dtype, device)
    *rope, slots = sequence._rope(0, max(sizes))
    options = sequence.norms | h.sizes
    with torch.no_grad():
        expected = sequence.ops.rope_cache(rope[0].clone(), *rope[1:], **options)
    for T in sizes:
        qkv, cos, sin, position = (x[:T].clone() for x in rope)
        cached = sequence.ops.rope_cache(qkv.clone(), cos, sin, position, slots=slots[:T], **options, **sequence.caches)
        trained = sequence.ops.rope_cache(qkv.requires_grad_(), cos, sin, position, **options)
        for found in (cached, trained):
            assert all(same(a, b[:T]) for a, b in zip(found, expected, strict=True)), f"{T} tokens"
        assert trained[0].requires_grad
    at = slots.long()
    for found, name in zip(expected[1:], ("k_cache", "v_cache")):
        kept = sequence.caches[name][at // sequence.page, :, at % sequence.page]
        assert same(kept, found), name


def check_rows(dtype: torch.dtype, device: torch.device, same: Same, sizes: tuple[int, ...], V: int, H: int) -> None:
    """Norms, activation, penalties, sampling and log-probabilities of the first rows are those of all rows."""
    torch.manual_seed(0)
    ops, most = kernels(dtype), max(sizes)
    x, residual = randn(2, most, H, dtype=dtype, device=device)
    weight = randn(H, dtype=dtype, device=device)
    logits = randn(most, V, dtype=dtype, device=device) * 3
    tokens = torch.randint(0, V, (most,), device=device)
    knobs = [torch.full((most,), value, device=device) for value in (0.8, 20, 0.9, 0.01)]
    knobs[1] = knobs[1].int()
    draws = (*knobs, torch.arange(most, device=device), torch.arange(most, device=device) * 7)
    penalize = _penalizes(most, V, device)

    def results(T: int) -> list[Tensor]:
        return [
            ops.rms_norm(x[:T], weight, 1e-6), *ops.add_rms_norm(x[:T], residual[:T], weight, 1e-6),
            ops.rms_norm_add(x[:T], residual[:T], weight, 1e-6), ops.gated_activation(x[:T], "silu"),
            ops.argmax(logits[:T]), ops.sample(logits[:T], *(d[:T] for d in draws)),
            *ops.logprobs(logits[:T], tokens[:T], 5), penalize(ops, logits[:T]),
        ]  # fmt: skip

    with poisoned():
        expected = results(most)
        for T in sizes:
            pairs = zip(results(T), expected, strict=True)
            assert all(same(a.double(), b[:T].double()) for a, b in pairs), f"{T} rows"
        assert torch.equal(ops.sample(logits.float(), *draws), ops.sample(logits, *draws)), "it depends on the dtype"


def _penalizes(rows: int, V: int, device: torch.device) -> Callable[[Kernels, Tensor], Tensor]:
    """The op with options of its own for each row."""
    history = torch.randint(0, V, (rows, 90), dtype=torch.int32, device=device)
    share = torch.arange(rows, device=device) / rows
    places = torch.arange(rows, dtype=torch.int32, device=device)
    bias_ids = torch.randint(0, V - 4, (rows, 1), device=device) + torch.arange(4, device=device)
    penalties = Penalties(
        prompt_lengths=places % 60, repetition=0.5 + share, frequency=share - 0.3, presence=0.6 - share,
        min_new_tokens=places % 40, eos=bias_ids[:, :2] + 1, bias_ids=bias_ids, bias=torch.randn(rows, 4).to(device),
    )  # fmt: skip
    counts = workspace(rows, V, device)
    return lambda ops, logits: ops.penalize(
        logits, places[: len(logits)], 60 + places[: len(logits)] % 30, history, penalties, counts
    )
