"""Rotary position embeddings: the frequencies of each published scaling, and the rows a step needs.

Sources: RoFormer (arXiv 2104.09864); YaRN (2309.00071), which also describes the linear and dynamic NTK scalings;
LongRoPE (2402.13753); Llama 3.1's scaling as published with its weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from cuformers.base.errors import bad_argument
from cuformers.nn.step import RopeRows, Step

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def is_number(value: object) -> bool:
    """Whether a value of a file is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """One rotary embedding, with the names that config.json uses."""

    dim: int
    """Rotated dimensions of each head, even; the rest of the head passes through."""
    rope_theta: float
    """Base of the frequencies."""
    rope_type: str = "default"
    """One of ROPE_TYPES."""
    max_position_embeddings: int = 2048
    """Longest sequence the model is meant for."""
    original_max_position_embeddings: int | None = None
    """Longest sequence of pretraining, before scaling; None means max_position_embeddings."""
    factor: float | None = None
    """How much longer the scaled context is."""
    attention_factor: float | None = None
    """Multiplies cos and sin; None derives it from the factor (yarn, longrope)."""
    beta_fast: float | None = None
    """Rotations above which yarn leaves a frequency alone; None means 32."""
    beta_slow: float | None = None
    """Rotations below which yarn divides a frequency by the factor; None means 1."""
    mscale: float | None = None
    """Scales yarn's attention factor; only with mscale_all_dim."""
    mscale_all_dim: float | None = None
    """Divides yarn's attention factor; only with mscale."""
    truncate: bool = True
    """Whether yarn rounds its ramp's ends to whole dimensions."""
    low_freq_factor: float | None = None
    """llama3: wavelengths above original / low_freq_factor are divided by the factor."""
    high_freq_factor: float | None = None
    """llama3: wavelengths below original / high_freq_factor are left alone."""
    short_factor: tuple[float, ...] | None = None
    """longrope: divisors of the frequencies within the original context, one per rotated pair."""
    long_factor: tuple[float, ...] | None = None
    """longrope: divisors beyond the original context, one per rotated pair."""

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise bad_argument("rope_type", self.rope_type, f"one of {list(ROPE_TYPES)}")
        least = 4 if self.rope_type == "dynamic" else 2  # dynamic's base has dim - 2 in a denominator
        if self.dim < least or self.dim % 2:
            raise bad_argument(
                "rotary dimensions", self.dim, f"an even number from {least} on", "See partial_rotary_factor."
            )
        self._check_numbers()
        for name in _NEEDS.get(self.rope_type, ()):
            if getattr(self, name) is None and not (self.rope_type == "yarn" and self.original != self.limit):
                raise bad_argument(f"rope_parameters[{name!r}]", None, f"a value, for rope_type={self.rope_type!r}")
        for name in ("short_factor", "long_factor"):
            given = getattr(self, name)
            if self.rope_type == "longrope" and len(given) != self.dim // 2:
                raise bad_argument(f"len({name})", len(given), f"{self.dim // 2}, one per rotated pair")
        if self.rope_type == "llama3" and not self.high_freq_factor > self.low_freq_factor:  # type: ignore[operator]
            allowed = f"more than low_freq_factor={self.low_freq_factor}"
            raise bad_argument("rope_parameters['high_freq_factor']", self.high_freq_factor, allowed)

    def _check_numbers(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None or f.name in ("rope_type", "truncate"):
                continue
            numbers = value if isinstance(value, tuple) else (value,)
            if isinstance(value, tuple) != f.name.startswith(("short", "long")) or not all(map(is_number, numbers)):
                raise bad_argument(f"rope_parameters[{f.name!r}]", value, "a number, or a list of them for longrope")
            if not f.name.startswith("mscale") and min(numbers, default=1) <= 0:
                raise bad_argument(f"rope_parameters[{f.name!r}]", value, "numbers above 0")

    @property
    def limit(self) -> int:
        return self.max_position_embeddings

    @property
    def original(self) -> int:
        return self.original_max_position_embeddings or self.max_position_embeddings


def _plain(spec: RopeSpec, base: float | None = None) -> Tensor:
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    return 1.0 / ((base or spec.rope_theta) ** exponents)


def _llama3(spec: RopeSpec) -> Tensor:
    assert spec.factor and spec.low_freq_factor and spec.high_freq_factor
    freqs = _plain(spec)
    turns = spec.original * freqs / (2 * math.pi)  # rotations over the original context
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    between = (1 - smooth) * freqs / spec.factor + smooth * freqs
    low, high = turns < spec.low_freq_factor, turns > spec.high_freq_factor
    return torch.where(low, freqs / spec.factor, torch.where(high, freqs, between))


def _yarn(spec: RopeSpec) -> Tensor:
    factor = spec.factor or spec.limit / spec.original

    def dim_of(rotations: float) -> float:
        turns = spec.original / (rotations * 2 * math.pi)
        return spec.dim * math.log(turns) / (2 * math.log(spec.rope_theta))

    low, high = dim_of(spec.beta_fast or 32), dim_of(spec.beta_slow or 1)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    freqs = _plain(spec)
    return freqs / factor * ramp + freqs * (1 - ramp)


def _longrope(spec: RopeSpec, factors: tuple[float, ...] | None) -> Tensor:
    assert factors is not None
    return _plain(spec) / torch.tensor(factors, dtype=torch.float32)


def frequency_sets(spec: RopeSpec) -> Tensor:
    """[sets, dim / 2], float32: the angular steps per position; longrope has two sets (short, long), others one."""
    match spec.rope_type:
        case "linear":
            assert spec.factor
            sets = [_plain(spec) / spec.factor]
        case "llama3":
            sets = [_llama3(spec)]
        case "yarn":
            sets = [_yarn(spec)]
        case "longrope":
            sets = [_longrope(spec, spec.short_factor), _longrope(spec, spec.long_factor)]
        case _:
            sets = [_plain(spec)]
    return torch.stack(sets)


def attention_factor(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by."""
    if spec.rope_type not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.rope_type == "longrope":
        factor = spec.limit / spec.original if spec.limit != spec.original else (spec.factor or 1.0)
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(spec.original))

    def scale(factor: float, mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    factor = spec.factor or spec.limit / spec.original
    if spec.mscale and spec.mscale_all_dim:
        return scale(factor, spec.mscale) / scale(factor, spec.mscale_all_dim)
    return scale(factor, 1.0)


class Rotary(nn.Module):
    """Tables of cos and sin for one RopeSpec; grown on demand, never saved.

    "dynamic" and "longrope" depend on a sequence's length. Each sequence goes by its own length, so that a row's
    result does not depend on its batch mates.
    """

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec = spec
        self._table: RopeRows | None = None
        self._outgrown: list[RopeRows] = []

    def reserve(self, length: int, device: torch.device) -> None:
        """Makes the tables hold positions 0 .. length - 1.

        Whoever builds a step whose positions pass its longest sequence calls this first: a decode step's length is
        known to the engine alone, and a table must not grow inside a captured graph.
        """
        table = self._table
        if table is not None and table.cos.device == device and table.rows.numel() >= length:
            return
        same_place = table is not None and table.cos.device == device
        # A captured graph may still read the smaller table, so it stays; sizes double, so all together are small.
        self._outgrown = [*self._outgrown, table] if table is not None and same_place else []
        size = max(1024, 1 << (length - 1).bit_length())
        positions = torch.arange(size, dtype=torch.int32, device=device)
        angles = positions.float()[:, None] * frequency_sets(self.spec).to(device)[:, None, :]  # [sets, size, dim / 2]
        factor = attention_factor(self.spec)
        cos, sin = (f(angles).mul(factor).flatten(0, 1) for f in (torch.cos, torch.sin))
        self._table = RopeRows(cos, sin, positions)

    def rows(self, step: Step) -> RopeRows:
        """The rotary factors for a step's tokens."""
        if self.spec.rope_type == "dynamic":
            return self._dynamic_rows(step)
        self.reserve(step.longest, step.positions.device)
        assert self._table is not None
        rows = step.positions
        if self.spec.rope_type == "longrope":
            beyond = _reached(step) > self.spec.original
            rows = rows + beyond.int() * self._table.rows.numel()  # the second half of the table holds the long set
        return RopeRows(self._table.cos, self._table.sin, rows)

    def _dynamic_rows(self, step: Step) -> RopeRows:
        spec = self.spec
        assert spec.factor
        # An answer that is computed anew, in one stretch, counts as it grew.
        length = torch.maximum(_reached(step), step.positions + 1).clamp(min=spec.limit).float()
        stretch = (spec.factor * length / spec.limit) - (spec.factor - 1)
        base = spec.rope_theta * stretch ** (spec.dim / (spec.dim - 2))  # [T]
        exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32, device=base.device) / spec.dim
        freqs = 1.0 / base[:, None] ** exponents
        angles = step.positions.float()[:, None] * freqs
        rows = torch.arange(step.positions.numel(), dtype=torch.int32, device=base.device)
        return RopeRows(angles.cos(), angles.sin(), rows)


def _reached(step: Step) -> Tensor:
    """[T]: the length that each token's sequence has reached by its last position, which need not count from zero."""
    if step.reached is not None:
        return step.reached
    assert step.cu_seqlens is not None, "a step carries cu_seqlens or the lengths reached"
    by_sequence = step.positions[(step.cu_seqlens[1:] - 1).long()] + 1
    tokens = torch.arange(step.positions.numel(), dtype=torch.int32, device=step.positions.device)
    return by_sequence[torch.searchsorted(step.cu_seqlens[1:], tokens, right=True)]


class RotarySet(nn.Module):
    """The rotary embeddings of a model by the name its layers ask for."""

    def __init__(self, specs: Mapping[str, RopeSpec]) -> None:
        super().__init__()
        self.by_name = nn.ModuleDict({name: Rotary(spec) for name, spec in specs.items()})

    def reserve(self, length: int, device: torch.device) -> None:
        """Makes every table hold positions 0 .. length - 1."""
        for rotary in self.by_name.values():
            assert isinstance(rotary, Rotary)
            rotary.reserve(length, device)

    @property
    def switch_length(self) -> int | None:
        """Length at which the factors of all earlier tokens change too (LongRoPE), so that no cached key is right."""
        specs = [rotary.spec for rotary in self.by_name.values() if isinstance(rotary, Rotary)]
        long = [spec.original + 1 for spec in specs if spec.rope_type == "longrope"]
        return min(long, default=None)

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's factors depend on how long its sequence is, apart from the switch ("dynamic")."""
        return any(rotary.spec.rope_type == "dynamic" for rotary in self.by_name.values() if isinstance(rotary, Rotary))

    def forward(self, step: Step) -> dict[str, RopeRows | None]:
        """Rotary factors of this step, by name."""
        return {name: rotary.rows(step) for name, rotary in self.by_name.items()}  # type: ignore[operator]
