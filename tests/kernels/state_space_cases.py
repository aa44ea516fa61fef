"""Inputs for the ops of state-space models: streams of several sequences, some of them empty or a token long."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .judge import Call, Case, randn

STREAMS = ((1,), (0, 5, 1, 0), (70, 3, 33), (2, 0))


class ScanShape(NamedTuple):
    """Sequences by length, and the sizes of a scan."""

    lengths: tuple[int, ...]
    heads: int
    """Channels of a selective scan, heads of an ssd scan."""
    groups: int
    head_dim: int
    state: int
    full: bool
    """With everything that may ride along, and rows that lie apart."""

    def __str__(self) -> str:
        sizes = f"{self.heads}x{self.groups}x{self.head_dim}x{self.state}"
        return f"{'_'.join(map(str, self.lengths))}-{sizes}{'-full' * self.full}"


SMALL_CONVOLUTIONS = tuple((lengths, C, K) for lengths, C, K in zip(STREAMS, (5, 130, 40, 3), (4, 3, 4, 2)))
SMALL_SCANS = (
    ScanShape((1,), 3, 1, 1, 4, False),
    ScanShape((0, 5, 1, 0), 35, 1, 1, 16, True),
    ScanShape((21, 3, 8), 40, 1, 1, 7, True),
    ScanShape((9, 2), 33, 1, 1, 16, False),
)
SMALL_SSD = (
    ScanShape((1,), 1, 1, 4, 8, False),
    ScanShape((0, 5, 1, 0), 2, 1, 16, 16, True),
    ScanShape((70, 3, 133), 4, 2, 40, 24, True),
    ScanShape((64, 65), 2, 1, 16, 40, False),
)


def cu_seqlens(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each sequence begins, and the end."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def apart(x: Tensor) -> Tensor:
    """The same values as the first part of wider rows, the rest of which is NaN."""
    wide = torch.full((x.shape[0], x[0:1].numel() + 5), torch.nan, dtype=x.dtype, device=x.device)
    view = wide[:, : x[0:1].numel()]
    view.copy_(x.flatten(1))
    return view.unflatten(1, x.shape[1:])


def convolutions(sizes: tuple[tuple[tuple[int, ...], int, int], ...] = SMALL_CONVOLUTIONS) -> list[Case]:
    """causal_conv1d, bare and with bias, silu and what was before; its last inputs too."""
    cases = []
    for lengths, C, K in sizes:
        for full in (False, True):

            def make(dtype, device, lengths=lengths, C=C, K=K, full=full) -> Call:
                make = {"dtype": dtype, "device": device}
                x, weight = randn(sum(lengths), C, **make), randn(C, K, **make)
                bounds = cu_seqlens(lengths, device)
                if not full:
                    return Call((x, weight, None, bounds), {"activation": "none", "keep": True})
                initial = randn(len(lengths), K - 1, C, **make)
                return Call((apart(x), weight, randn(C, **make), bounds), {"initial": initial, "keep": True})

            name = f"{'_'.join(map(str, lengths))}-{C}x{K}{'-full' * full}"
            cases.append(Case("causal_conv1d", name, make))
    return cases


def scans(shapes: tuple[ScanShape, ...] = SMALL_SCANS) -> list[Case]:
    """selective_scan."""

    def maker(shape: ScanShape) -> Any:
        def make(dtype: torch.dtype, device: torch.device) -> Call:
            T, C, S = sum(shape.lengths), shape.heads, shape.state
            noise = {"dtype": dtype, "device": device}
            x, dt, B, c = randn(T, C, **noise), randn(T, C, **noise), randn(T, S, **noise), randn(T, S, **noise)
            A = -torch.rand(C, S).to(device) * 2
            return _call(shape, (x, dt, A, B, c), (C,), (C, S), noise)

        return make

    return [Case("selective_scan", str(shape), maker(shape)) for shape in shapes]


def ssd_scans(shapes: tuple[ScanShape, ...] = SMALL_SSD) -> list[Case]:
    """ssd_scan."""

    def maker(shape: ScanShape) -> Any:
        def make(dtype: torch.dtype, device: torch.device) -> Call:
            T, H, G, P, S = sum(shape.lengths), *shape[1:5]
            noise = {"dtype": dtype, "device": device}
            x, dt = randn(T, H, P, **noise), randn(T, H, **noise)
            B, c = randn(T, G, S, **noise), randn(T, G, S, **noise)
            A = -torch.rand(H).to(device) * 2
            call = _call(shape, (x, dt, A, B, c), (H,), (H, P, S), noise)
            if shape.full:
                call.kwargs["dt_limit"] = (0.3, 1.5)
            return call

        return make

    return [Case("ssd_scan", str(shape), maker(shape)) for shape in shapes]


def _call(
    shape: ScanShape, args: tuple[Tensor, ...], per_head: tuple[int, ...], state: tuple[int, ...], noise: dict
) -> Call:
    bounds = cu_seqlens(shape.lengths, noise["device"])
    if not shape.full:
        return Call((*args, bounds), {"keep": True})
    x, dt, A, B, C = args
    first = randn(len(shape.lengths), *state, dtype=torch.float32, device=noise["device"])
    D, bias, z = randn(*per_head, **noise), randn(*per_head, **noise), apart(randn(*x.shape, **noise))
    riding = {"D": D, "z": z, "dt_bias": bias}
    return Call((apart(x), apart(dt), A, apart(B), apart(C), bounds), {**riding, "initial": first, "keep": True})


def state_space() -> list[Case]:
    """All of them, small."""
    return [*convolutions(), *scans(), *ssd_scans()]
