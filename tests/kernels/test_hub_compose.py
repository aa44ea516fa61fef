"""A table with parts taken out computes the same, through the functions that replace them, and knows every fused op."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cuformers.kernels.hub.adapters import plain
from cuformers.kernels.hub.compose import Parts, compose
from cuformers.kernels.hub.layers import LAYERS
from cuformers.kernels.hub.taken import PART, WHOLE
from cuformers.kernels.norm_args import Norm
from cuformers.kernels.table import OPS, reference

T, H, WIDTH, HEADS, KV_HEADS, D, ROT = 7, 24, 20, 4, 2, 16, 12
TABLE = {choice.op: choice.function for choice in reference().choices}


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def parts(seen: list[str]) -> dict[str, Any]:
    def noted(name: str, function: Callable) -> Callable:
        def call(*args: Any) -> Any:
            seen.append(name)
            return function(*args)

        return call

    return {
        "norm": noted("norm", plain(LAYERS["RMSNorm"])),
        "gated": {"silu": noted("gated", plain(LAYERS["SiLU"]))},
        "rotate": noted("rotate", plain(LAYERS["rotary_pos_emb"])),
    }


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def rope_arguments(rotated: bool, normed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    angles = r(40, ROT // 2)
    factors = (angles.cos(), angles.sin()) if rotated else (None, None)
    norms = {"q_norm": Norm(r(D), 1e-5), "k_norm": Norm(r(D + 1)[:D], 1e-5)} if normed else {}
    rows = torch.arange(T, dtype=torch.int32) * 3
    return (r(T, (HEADS + 2 * KV_HEADS) * D), *factors, rows), {"num_heads": HEADS, **norms}


def caches() -> dict[str, Tensor]:
    slots = torch.tensor([3, -1, 9, 14, 2, 7, 11], dtype=torch.int32)
    shape = (4, KV_HEADS, 4, D)
    return {"k_cache": torch.zeros(shape), "v_cache": torch.zeros(shape), "slots": slots}


X, NORM = r(T, H), Norm(r(H), 1e-5)
IDS = torch.tensor([[0, 2], [2, 1], [4, 0], [2, 4], [1, 2], [0, 1], [2, 0]], dtype=torch.int32)
MIXTURE = (X, r(5, 2 * WIDTH, H), r(5, H, WIDTH), r(T, 2).softmax(1), IDS)
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], list[str]]] = {
    "rms_norm": ("rms_norm", (X, *NORM), {}, ["norm"]),
    "add_rms_norm": ("add_rms_norm", (X, r(T, H) * 2, *NORM), {}, ["norm"]),
    "rms_norm_add": ("rms_norm_add", (X, r(T, H) * 2, *NORM), {}, ["norm"]),
    "linear": ("linear", (X, r(5, H), r(5)), {"norm": NORM, "residual": r(T, 5), "scale": 0.5}, ["norm"]),
    "linear-bare": ("linear", (X, r(5, H)), {}, []),
    "gated_linear": ("gated_linear", (X, r(2 * WIDTH, H), None, "silu"), {"norm": NORM}, ["norm", "gated"]),
    "gated_linear-bare": ("gated_linear", (X, r(2 * WIDTH, H), r(2 * WIDTH), "silu"), {}, ["gated"]),
    "gated_linear-other": ("gated_linear", (X, r(2 * WIDTH, H), None, "gelu"), {"norm": NORM}, ["norm"]),
    "experts": ("experts", (*MIXTURE, "silu"), {"residual": r(T, H), "scale": 0.5}, ["gated"]),
    "experts-other": ("experts", (*MIXTURE, "gelu"), {}, []),
    "gated_activation": ("gated_activation", (r(T, 2 * WIDTH), "silu"), {}, ["gated"]),
    "gated_activation-other": ("gated_activation", (r(T, 2 * WIDTH), "relu"), {}, []),
}


def close(a: Any, b: Any) -> None:
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (a, b)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("op", "args", "kwargs", "expected"), CALLS.values(), ids=CALLS)
def test_products_and_norms(
    op: str, args: tuple, kwargs: dict, expected: list[str], seen: list[str], parts: dict[str, Any]
) -> None:
    functions = {**TABLE, **compose(TABLE, Parts(**parts))}
    close(functions[op](*args, **kwargs), TABLE[op](*args, **kwargs))
    assert seen == expected


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("replaced", [("norm",), ("rotate",), ("norm", "rotate")], ids="-".join)
def test_heads_before_the_cache(
    replaced: tuple[str, ...], normed: bool, rotated: bool, cached: bool, seen: list[str], parts: dict[str, Any]
) -> None:
    functions = compose(TABLE, Parts(**{name: parts[name] for name in replaced}))
    args, kwargs = rope_arguments(rotated, normed)
    kwargs |= {"num_kv_heads": KV_HEADS, "head_dim": D}
    ours, theirs = (caches() if cached else {} for _ in range(2))
    close(functions["rope_cache"](*args, **kwargs, **ours), TABLE["rope_cache"](*args, **kwargs, **theirs))
    close(tuple(ours.values()), tuple(theirs.values()))
    counted = {"norm": 2 * normed, "rotate": int(rotated)}
    assert {name: seen.count(name) for name in replaced} == {name: counted[name] for name in replaced}


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_decode_attention(normed: bool, rotated: bool, seen: list[str], parts: dict[str, Any]) -> None:
    functions = compose(TABLE, Parts(norm=parts["norm"], rotate=parts["rotate"]))
    args, kwargs = rope_arguments(rotated, normed)
    results = []
    for function in (functions["decode_attention"], TABLE["decode_attention"]):
        slots = torch.arange(T, dtype=torch.int32) * 4 + 2
        lengths = torch.full((T,), 3, dtype=torch.int32)
        tables = torch.arange(T, dtype=torch.int32)[:, None]
        keys, values = (r(T, KV_HEADS, 4, D) for _ in range(2))
        out = function(*args, keys, values, slots, tables, lengths, **kwargs, scale=0.3, window=None, softcap=5.0)
        results.append((out, keys, values))
    close(*results)
    assert seen == ["norm"] * (2 * normed) + ["rotate"] * rotated


def test_what_is_not_replaced_stays_the_very_function(parts: dict[str, Any]) -> None:
    assert compose(TABLE, Parts()) == {}
    assert set(compose(TABLE, Parts(gated=parts["gated"]))) == {"gated_linear", "gated_activation", "experts"}
    assert set(compose(TABLE, Parts(rotate=parts["rotate"]))) == {"rope_cache", "decode_attention"}
    for kind, names in (("norm", {"norm"}), ("gated", {"gated"}), ("rotary", {"rotate"})):
        changed = set(compose(TABLE, Parts(**{name: parts[name] for name in names})))
        assert changed == {*WHOLE[kind], *PART[kind]}  # type: ignore[index]


def test_every_op_that_fuses_a_layer_is_taken_apart() -> None:
    """A new op with a norm, an activation or a rotation inside must be known here, or a hub layer would not run."""
    inside = {"norm": "norm", "q_norm": "norm", "k_norm": "norm", "activation": "gated", "cos": "rotary"}
    deterministic = {op.name for op in OPS if op.name.startswith("invariant_")}  # refused together with hub layers
    no_layer = {"causal_conv1d"}  # its activation is a part of the convolution, in the hub's own kernels too
    for op in OPS:
        parameters = inspect.signature(op.implementations[-1].load()).parameters
        for kind in {inside[name] for name in parameters if name in inside}:
            known = {*WHOLE[kind], *PART[kind]} | deterministic | no_layer  # type: ignore[index]
            assert op.name in known, f"compose.py does not know that {op.name} has a {kind} inside"
